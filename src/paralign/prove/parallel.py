"""The run that is judged: what every rank of ``paralign align`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.batch import LocalBatch
from paralign.config.run import RunConfig
from paralign.mesh import degrees_of
from paralign.models.router import named_routers
from paralign.program import Program
from paralign.prove.hooks import Hooks
from paralign.prove.own_program import run_own_program
from paralign.prove.routing import RoutingTable, RoutingWatch, numbers_of
from paralign.prove.steps import Run, record_steps
from paralign.train.build import Numerics, build_program


def run_parallel(
    config: RunConfig, precision: Numerics, trace: Path, references: Path | None = None
) -> None:
    """Train ``config.align.steps`` steps on every rank and record them into ``trace``.

    Args:
        config: The run.
        precision: Its dtypes.
        trace: Folder of the trace.
        references: Folder of the traces ``reference`` and, below float64, ``truth``, with whose
            router choices this run's are compared. Below float64 they are replayed.
    """
    if config.program is not None:
        run_own_program(config, precision, trace)
        return
    program = build_program(config, precision)
    watch = watch_routing(program, precision, references)
    record_steps(config, precision, run_of(program, watch=watch), trace, "parallel run")
    if watch is not None:
        watch.write(trace, dist.get_rank())


def watch_routing(
    program: Program, precision: Numerics, references: Path | None
) -> RoutingWatch | None:
    """Let the routers of ``program`` be watched; None where there is nothing to compare with.

    Args:
        program: What will be trained.
        precision: Its dtypes.
        references: As :func:`run_parallel`.
    """
    if references is None or not RoutingTable(references / "reference").exists:
        return None
    truth = None if precision.name == "float64" else RoutingTable(references / "truth")
    routers = named_routers(program.modules)
    return RoutingWatch(routers, RoutingTable(references / "reference"), truth)


def run_of(
    program: Program, hooks: Hooks | None = None, *, watch: RoutingWatch | None = None
) -> Run:
    """Say how the recorded loop trains ``program``.

    Args:
        program: What is trained. Its methods are looked up when they are called, so that a fault
            may replace them.
        hooks: Called in between.
        watch: Told of every step and which tokens it has, if its routers are watched.
    """
    hooks = hooks or Hooks()
    cut: list[LocalBatch] = []  # this rank's share of the step's batch
    numbers: list[Tensor] = []  # of its tokens, where they are asked for

    def inputs(global_batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        honest = program.shard(global_batch)
        cut[:] = [hooks.change_batch(honest)]
        if watch is not None:
            numbers[:] = [_numbers(program, honest)]
        tensors = {**cut[0].tensors, "samples": _samples(program, cut[0])}
        tensors.pop("documents", None)  # of whole rows: no slice that could be misplaced
        tensors.pop("draws", None)
        pieces = program.plan.num_microbatches
        parts = {name: tensor.chunk(pieces) for name, tensor in tensors.items()}
        for number in range(pieces):
            yield {name: part[number] for name, part in parts.items()}

    def step(global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        [batch] = cut
        if watch is not None:
            watch.begin_step()
            batch = _numbered(batch, numbers[0])
        loss = program.step(batch)
        hooks.backward_done()
        return loss, batch.num_global_tokens

    return Run(
        modules=program.modules,
        parameters=dict(program.named_parameters()),
        step=step,
        clip=lambda largest: program.clip_grad_norm_(largest),
        num_microbatches=program.plan.num_microbatches,
        mesh=program.mesh,
        names=program.tied_aliases,
        outputs=program.output_parts,
        output_grads=program.output_grad_parts,
        speaks=dist.get_rank() == 0,
        before_step=hooks.step_begins,
        after_step=hooks.step_done,
        inputs_of=inputs,
        update_routers=lambda: program.update_routers(),
    )


def _numbers(program: Program, batch: LocalBatch) -> Tensor:
    """Number this rank's tokens in the global batch."""
    return numbers_of(_samples(program, batch), batch.tensors["positions"], batch.seq_len)


def _numbered(batch: LocalBatch, numbers: Tensor) -> LocalBatch:
    """Let ``batch`` tell routers which tokens it has; not where a fault has put in others."""
    if numbers.shape != batch.tensors["tokens"].shape:
        return batch
    return replace(batch, tensors={**batch.tensors, "numbers": numbers})


def _samples(program: Program, batch: LocalBatch) -> Tensor:
    """Return the numbers of this rank's rows in the global batch, which no content can tell."""
    degrees = degrees_of(program.mesh)
    at = degrees.coordinates(program.mesh.get_rank())
    rows = batch.tensors["tokens"].shape[0]
    first = rows * (at["dp_replicate"] * degrees.dp_shard + at["dp_shard"])
    return torch.arange(first, first + rows)
