"""Runs with one thing broken on purpose; each function breaks it on this rank, then trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import paralign.batch
import paralign.models.decoder
import paralign.parallel.data
import paralign.parallelize
import paralign.prove.parallel
import paralign.train.build
from paralign.config.run import RunConfig
from paralign.documents import document_starts
from paralign.dropout import Dropout, token_draws
from paralign.loss import shift_labels
from paralign.models.decoder import DecoderBlueprint
from paralign.parallel.context import ContextParallel
from paralign.parallel.pipeline import PipelineRuntime
from paralign.parallel.stage import Stage
from paralign.program import Program
from paralign.prove.parallel import run_parallel
from paralign.prove.steps import Run
from paralign.train.build import build_pieces, numerics

DP_SIZE = 2


def run_broken(name: str, config: RunConfig, trace: Path) -> None:
    """Break what ``name`` says, then run."""
    BREAKS[name]()
    run_parallel(config, numerics("float64", config), trace)


def nothing() -> None:
    """Leave everything as it is: the run that must be aligned."""


def _replace(owner: Any, attribute: str, value: Any) -> None:
    mock.patch.object(owner, attribute, value).start()


def feature_axis_for_heads() -> None:
    """Trade the sequence for features of a head, which attention contracts, not for heads."""
    style = ContextParallel(seq_dim=2, head_dim=3, mask_kwarg_name="mask", guards=False)
    _replace(DecoderBlueprint, "attention", lambda self: {"attention.core": style})


def cp_left_out_of_the_fsdp_mesh() -> None:
    _replace(paralign.parallel.data, "fsdp_mesh", lambda mesh: mesh["dp_shard"])


def whole_sequences() -> None:
    """Feed each cp rank the whole sequence where its slice is due."""

    def everything(seq_len: int, cp: int, load_balance: bool) -> list[Tensor]:
        return [torch.arange(seq_len)] * cp

    _replace(paralign.batch, "sequence_positions", everything)


def layers_remapped_by_rank_over_dp_size() -> None:
    """Name this rank's layers by an offset that mixes up pipeline and data ranks."""
    record = Run

    def renamed(**fields: Any) -> Any:
        shift = dist.get_rank() // DP_SIZE - (dist.get_rank() // 4) * 2
        wrong = {
            name: _shift_layer(name, shift)
            for module in fields["modules"]
            for name, _ in module.named_parameters()
            if name.startswith("layers.")
        }
        return record(**{**fields, "names": wrong})

    _replace(paralign.prove.parallel, "Run", renamed)


def _shift_layer(name: str, shift: int) -> str:
    first, index, rest = name.split(".", 2)
    return f"{first}.{(int(index) + shift) % 4}.{rest}"


def attention_crosses_documents() -> None:
    _replace(paralign.models.decoder, "document_mask", lambda documents: None)


def documents_of_another_row() -> None:
    """Give every row the documents of its neighbour."""

    def wrong(documents: Tensor) -> Tensor:
        return document_starts(documents).roll(1, 0)

    _replace(paralign.batch, "document_starts", wrong)


def masks_by_rank() -> None:
    """Draw from a seed of each rank's own."""

    def wrong(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
        return token_draws(seed + dist.get_rank(), samples, positions)

    _replace(paralign.batch, "token_draws", wrong)


def masks_by_local_row() -> None:
    def wrong(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
        return token_draws(seed, torch.arange(len(samples)), positions)

    _replace(paralign.batch, "token_draws", wrong)


def masks_by_local_position() -> None:
    def wrong(seed: int, samples: Tensor, positions: Tensor) -> Tensor:
        return token_draws(seed, samples, torch.arange(positions.shape[1]).expand_as(positions))

    _replace(paralign.batch, "token_draws", wrong)


def masks_by_layer_of_the_stage() -> None:
    """Number the layers of each stage from zero."""

    def wrong(stage: Stage, mesh: Any) -> None:
        for number, name in enumerate(stage.layer_names):
            layer = stage.get_submodule(name)
            for leaf in ("attention_dropout", "ffn_dropout"):
                module = layer.get_submodule(leaf)
                assert isinstance(module, Dropout)
                module.called(f"layers.{number}.{leaf}")

    _replace(paralign.parallelize, "_share_dropouts", wrong)


def masks_alike_on_parts_of_the_stream() -> None:
    """Give every rank of tp the mask of the first part."""
    spread = Dropout.spread
    _replace(Dropout, "spread", lambda self, rank, degree: spread(self, 0, degree))


def dropouts_not_told_of_tp() -> None:
    _replace(Dropout, "spread", lambda self, rank, degree: None)


def masks_drawn_again_when_recomputed() -> None:
    """Let every call of a module draw another mask."""
    forward = Dropout.forward
    calls = [0]

    def wrong(self: Dropout, x: Tensor, draws: Tensor) -> Tensor:
        calls[0] += torch._C._current_graph_task_id() != -1  # in the backward pass
        return forward(self, x, draws + calls[0])

    _replace(Dropout, "forward", wrong)


def mean_of_micro_batch_means() -> None:
    """Weigh every micro-batch and rank alike, however many tokens it has."""

    def loss(self: PipelineRuntime, loss_sum: Tensor, labels: Tensor) -> Tensor:
        parts = 4 * DP_SIZE * 2  # micro-batches x dp x cp
        return loss_sum / (labels != -100).sum().clamp(min=1) / parts

    _replace(PipelineRuntime, "_loss", loss)


def labels_shifted_after_the_split() -> None:
    shard = Program.shard

    def shifted_late(self: Program, global_batch: Any) -> Any:
        batch = shard(self, global_batch)
        late = shift_labels(batch.tensors["tokens"])
        ignored = batch.tensors["labels"] == -100
        batch.tensors["labels"] = late.masked_fill(ignored, -100)
        return batch

    _replace(Program, "shard", shifted_late)


def head_without_one_micro_batch() -> None:
    """Leave the first micro-batch out of the gradient of the head."""
    calls: list[None] = []

    def epilogue(self: DecoderBlueprint, pieces: Any, x: Tensor, context: Any) -> Tensor:
        if not x.is_meta:  # shapes are found on the meta device
            calls.append(None)
        head, hidden = pieces.head, pieces.norm(x)
        weight = head.weight.detach() if len(calls) == 1 else head.weight
        return F.linear(hidden, weight, head.bias)

    _replace(DecoderBlueprint, "epilogue", epilogue)


def ends_outside_every_unit() -> None:
    """Leave embedding, norm and head out of FSDP, so that nothing reduces their gradients."""
    shard = fully_shard

    def without_ends(modules: Any, **settings: Any) -> Any:
        if isinstance(modules, Stage):
            names = ("embedding", "norm", "head")
            kept = {p for n, p in modules.named_parameters() if n.startswith(names)}
            settings["ignored_params"] = kept
        return shard(modules, **settings)

    build = build_pieces

    def build_real(config: RunConfig, dtype: torch.dtype) -> Any:
        model, blueprint = build(config, dtype)
        return model.to_empty(device="cpu"), blueprint  # so that whole weights are initialised

    _replace(paralign.parallel.data, "fully_shard", without_ends)
    # A step notices by itself that a unit with gradients was not reduced.
    _replace(Program, "_reduction_problems", lambda program: [])
    _replace(paralign.train.build, "build_pieces", build_real)


BREAKS: dict[str, Callable[[], None]] = {
    breaker.__name__: breaker
    for breaker in (
        nothing,
        feature_axis_for_heads,
        cp_left_out_of_the_fsdp_mesh,
        whole_sequences,
        layers_remapped_by_rank_over_dp_size,
        mean_of_micro_batch_means,
        labels_shifted_after_the_split,
        head_without_one_micro_batch,
        ends_outside_every_unit,
        attention_crosses_documents,
        documents_of_another_row,
        masks_by_rank,
        masks_by_local_row,
        masks_by_local_position,
        masks_by_layer_of_the_stage,
        masks_alike_on_parts_of_the_stream,
        dropouts_not_told_of_tp,
        masks_drawn_again_when_recomputed,
    )
}
