"""The run that is judged: what every rank of ``paralign align`` does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from paralign.config.run import RunConfig
from paralign.mesh import build_mesh
from paralign.parallelize import parallelize
from paralign.program import Program
from paralign.prove.build import (
    Numerics,
    build_pieces,
    build_plans,
    init_rule,
    initialise_whole,
)
from paralign.prove.steps import Run, record_steps


def build_program(config: RunConfig, precision: Numerics) -> Program:
    """Build this rank's part of the run that ``config`` describes. Collective over the world."""
    degrees = config.mesh.degrees
    mesh = build_mesh(degrees, config.device)
    model, blueprint = build_pieces(config, precision.master)
    rule = init_rule(config, blueprint)
    if not any(parameter.is_meta for parameter in model.parameters()):
        initialise_whole(model, rule, seed=config.align.seed)
    pipeline, fsdp, context = build_plans(config)
    return parallelize(
        model,
        mesh,
        blueprint=blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        context=context,
        precision=precision.precision,
        init=rule,
        seed=config.align.seed,
    )


def run_parallel(config: RunConfig, precision: Numerics, trace: Path) -> None:
    """Train ``config.align.steps`` steps on every rank and record them into ``trace``."""
    program = build_program(config, precision)

    def step(global_batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        batch = program.shard(global_batch)
        return program.step(batch), batch.num_global_tokens

    run = Run(
        modules=program.modules,
        parameters=list(program.parameters()),
        step=step,
        clip=program.clip_grad_norm_,
        mesh=program.mesh,
        names=program.tied_aliases,
        speaks=dist.get_rank() == 0,
    )
    record_steps(config, precision, run, trace, "parallel run")
