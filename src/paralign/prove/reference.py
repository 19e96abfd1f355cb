"""The run that everything is compared with: one device, the model's own ``forward``, plain torch.

Nothing that spreads a model is used here, only what it has in common with the parallel run: the
parts that stay in float32. The whole global batch goes through in chunks of rows, each
weighted by the global number of valid tokens, so that memory is that of a micro-batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.documents import document_starts
from paralign.dropout import name_dropouts, token_draws
from paralign.loss import count_valid_tokens, token_cross_entropy_sum
from paralign.models.compose import check_composition
from paralign.models.router import (
    named_biases,
    named_routers,
    take_balance_loss,
    update_biases,
)
from paralign.parallel.precision import apply_precision
from paralign.planning import check_precision
from paralign.prove.routing import RoutingRecorder, RoutingTable
from paralign.prove.steps import Run, record_steps
from paralign.train.build import (
    Numerics,
    build_data,
    build_pieces,
    init_rule,
    initialise_whole,
)
from paralign.train.start import start_whole


def run_reference(
    config: RunConfig,
    precision: Numerics,
    trace: Path,
    replay: Path | None = None,
    *,
    alone: bool = False,
) -> None:
    """Train ``config.align.steps`` steps on one device and record them into ``trace``.

    Args:
        config: The run; its mesh only decides how many rows go through at once.
        precision: Dtypes of the run.
        trace: Folder of the trace; what routers choose is kept beside it.
        replay: Trace of the run whose router choices tokens are sent by; None: by its own.
        alone: This process belongs to a process group that takes no part.

    Raises:
        ConfigError: The blueprint does not compose to the model.
    """
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    start_whole(model, config)
    some_rows = build_data(config).global_batch(0)
    seed = config.align.seed
    check_composition(model, blueprint, _with_positions(some_rows, seed, rows=slice(0, 2)))
    step = ReferenceStep(
        model, blueprint, precision, num_rows=_rows_per_chunk(config), dropout_seed=seed
    )

    log = RoutingRecorder(
        named_routers([step.working_model]),
        None if replay is None else RoutingTable(replay),
        num_tokens=config.batch.global_batch * config.batch.seq_len,
    )

    def logged_step(global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        log.begin_step()
        return step(global_batch)

    def clip(largest: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), largest)

    run = Run(
        modules=[model],
        parameters=dict(model.named_parameters()),
        step=logged_step,
        clip=clip,
        alone=alone,
        forward_modules=[step.working_model],
        inputs_of=step.inputs,
        update_routers=step.update_routers,
    )
    record_steps(config, precision, run, trace, f"{precision.name} reference")
    log.write(trace)


class ReferenceStep:
    """Forward and backward of a whole batch on one device, in chunks of rows.

    With ``compute`` below ``master``, each chunk runs through a copy of the model in the compute
    dtype and its gradients are added in the reduce dtype to the master weights', which is the
    arithmetic that sharded mixed precision stands for.
    """

    def __init__(
        self,
        model: nn.Module,
        blueprint: Blueprint,
        precision: Numerics,
        *,
        num_rows: int,
        dropout_seed: int = 0,
    ) -> None:
        self._model = name_dropouts(model)
        self._dropout_seed = dropout_seed
        self._blueprint = blueprint
        self._precision = precision
        self._num_rows = num_rows
        is_mixed = precision.compute != precision.master
        self._working = _lowered(model, precision.compute) if is_mixed else model
        check_precision(model, blueprint, precision.precision)
        apply_precision(self._working, blueprint, precision.precision)

    @property
    def working_model(self) -> nn.Module:
        """The model that computes: the master's copy in the compute dtype, or itself."""
        return self._working

    def __call__(self, global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Add the gradients of the global loss to ``.grad``.

        Returns:
            The loss and the number of valid tokens of the batch.
        """
        batch = _with_positions(global_batch, self._dropout_seed)
        batch["numbers"] = torch.arange(batch["tokens"].numel()).view_as(batch["tokens"])
        num_tokens = int(count_valid_tokens(batch["labels"]))
        if self._working is not self._model:
            self._working.load_state_dict(self._model.state_dict())
        routers = named_routers([self._working]).values()
        total = torch.zeros((), dtype=torch.float64)
        sums: dict[str, Tensor] = {}
        for chunk in self._chunks(batch):
            counted = {**chunk, "num_tokens": torch.tensor(num_tokens, dtype=torch.float64)}
            logits = self._blueprint.forward(self._working, counted)
            loss = token_cross_entropy_sum(logits, chunk["labels"]) / num_tokens
            torch.autograd.backward(loss)
            total += loss.detach()
            balance = take_balance_loss(routers)
            if balance is not None:
                total += balance
            if self._working is not self._model:
                self._take_gradients(sums)
        if self._working is not self._model:
            for name, parameter in self._model.named_parameters():
                if name in sums:
                    parameter.grad = sums[name].to(self._precision.master)
        return total, num_tokens

    def update_routers(self) -> None:
        """Move every router's bias by what was counted since the last call."""
        update_biases(named_routers([self._working]).values())
        if self._working is not self._model:
            masters = named_biases([self._model])
            for name, bias in named_biases([self._working]).items():
                masters[name].copy_(bias)

    def inputs(self, global_batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield what each chunk is fed, with the numbers of its samples."""
        batch = _with_positions(global_batch, self._dropout_seed)
        batch.pop("documents", None)  # whole rows, which no rank is fed a slice of
        batch.pop("draws", None)
        numbers = torch.arange(batch["tokens"].shape[0])
        yield from self._chunks({**batch, "samples": numbers})

    def _take_gradients(self, sums: dict[str, Tensor]) -> None:
        for name, parameter in self._working.named_parameters():
            if parameter.grad is None:
                continue
            grad = parameter.grad.to(self._precision.reduce)
            sums[name] = sums[name] + grad if name in sums else grad
            parameter.grad = None

    def _chunks(self, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for start in range(0, batch["tokens"].shape[0], self._num_rows):
            yield {name: tensor[start : start + self._num_rows] for name, tensor in batch.items()}


def _lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy ``model`` with parameters in ``dtype``; buffers keep theirs, as they do under FSDP."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied


def _rows_per_chunk(config: RunConfig) -> int:
    """Return the rows of one micro-batch of one rank."""
    share = config.mesh.degrees.dp * config.pipeline.num_microbatches
    return max(1, config.batch.global_batch // share)


def _with_positions(
    batch: Mapping[str, Tensor], seed: int, rows: slice = slice(None)
) -> dict[str, Tensor]:
    num_rows, seq_len = batch["tokens"].shape
    whole = {**batch, "positions": torch.arange(seq_len).expand(num_rows, -1)}
    if (samples := whole.pop("samples", None)) is not None:
        whole["draws"] = token_draws(seed, samples, whole["positions"])
    if "documents" in batch:
        whole["documents"] = document_starts(batch["documents"])
    return {name: tensor[rows] for name, tensor in whole.items()}
