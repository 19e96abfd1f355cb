"""The run that is judged: what every rank of ``paralign align`` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.batch import LocalBatch
from paralign.config.run import RunConfig
from paralign.mesh import degrees_of
from paralign.program import Program
from paralign.prove.hooks import Hooks
from paralign.prove.own_program import run_own_program
from paralign.prove.steps import Run, record_steps
from paralign.train.build import Numerics, build_program


def run_parallel(config: RunConfig, precision: Numerics, trace: Path) -> None:
    """Train ``config.align.steps`` steps on every rank and record them into ``trace``."""
    if config.program is not None:
        run_own_program(config, precision, trace)
        return
    run = run_of(build_program(config, precision))
    record_steps(config, precision, run, trace, "parallel run")


def run_of(program: Program, hooks: Hooks | None = None) -> Run:
    """Say how the recorded loop trains ``program``.

    Args:
        program: What is trained. Its methods are looked up when they are called, so that a fault
            may replace them.
        hooks: Called in between.
    """
    hooks = hooks or Hooks()
    cut: list[LocalBatch] = []  # this rank's share of the step's batch

    def inputs(global_batch: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        cut[:] = [hooks.change_batch(program.shard(global_batch))]
        tensors = {**cut[0].tensors, "samples": _samples(program, cut[0])}
        pieces = program.plan.num_microbatches
        parts = {name: tensor.chunk(pieces) for name, tensor in tensors.items()}
        for number in range(pieces):
            yield {name: part[number] for name, part in parts.items()}

    def step(global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        [batch] = cut
        loss = program.step(batch)
        hooks.backward_done()
        return loss, batch.num_global_tokens

    return Run(
        modules=program.modules,
        parameters=list(program.parameters()),
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


def _samples(program: Program, batch: LocalBatch) -> Tensor:
    """Return the numbers of this rank's rows in the global batch, which no content can tell."""
    degrees = degrees_of(program.mesh)
    at = degrees.coordinates(program.mesh.get_rank())
    rows = batch.tensors["tokens"].shape[0]
    first = rows * (at["dp_replicate"] * degrees.dp_shard + at["dp_shard"])
    return torch.arange(first, first + rows)
