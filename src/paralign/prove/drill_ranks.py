"""What every rank of a drill does: the same run again and again, each time with one fault in it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.config.run import RunConfig
from paralign.data.source import TokenSource
from paralign.launch import report_event
from paralign.mesh import build_mesh
from paralign.program import Program
from paralign.prove.fault import Fault
from paralign.prove.fault_list import all_faults
from paralign.prove.fault_run import FaultRun
from paralign.prove.one_world import RunDone
from paralign.prove.own_program import OwnProgram, build_own_program, record_own_program
from paralign.prove.parallel import run_of, watch_routing
from paralign.prove.steps import record_steps
from paralign.train.build import Numerics, build_data, build_program

CLEAN = "clean"


def run_faults(
    names: Sequence[str], config: RunConfig, precision: Numerics, file: Path | None, folder: Path
) -> None:
    """Record one run for each name, in one world; ``clean`` has no fault.

    Args:
        names: Faults, in order.
        config: The run.
        precision: Its dtypes.
        file: The user's faults, besides those that paralign has.
        folder: Each run's trace goes into a folder of its name.
    """
    known = {fault.name: fault for fault in all_faults(file)}
    mesh = build_mesh(config.mesh.degrees, config.device)
    data = build_data(config)
    # What is imported stays: collecting it after every run would take as long as a step.
    gc.collect()
    gc.freeze()
    for name in names:
        _run_one(config, precision, mesh, data, known.get(name), folder, name)
        # Programs hold reference cycles with hooks; their memory is due back before the next.
        gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            report_event(RunDone(name))


def _run_one(
    config: RunConfig,
    precision: Numerics,
    mesh: DeviceMesh,
    data: TokenSource,
    fault: Fault | None,
    folder: Path,
    name: str,
) -> None:
    own, trace = config.program is not None, folder / name

    def build() -> Any:
        if own:
            return build_own_program(config, precision, mesh=mesh)[0]
        return build_program(config, precision, mesh=mesh)

    run = FaultRun(config, mesh, build=build, parts=_own_parts if own else _parts)
    try:
        if fault is not None:
            fault.breaks(run)
        if own:
            record_own_program(config, precision, run.program, mesh, trace, run.hooks, data)
        else:
            # Only what went into a reduction can tell a wrong reduction from a wrong gradient.
            watch = watch_routing(run.program, precision, folder)
            honest = run_of(run.program, run.hooks, watch=watch)
            record_steps(
                config,
                precision,
                replace(honest, contributions=True, data=data),
                trace,
                name,
            )
            if watch is not None:
                watch.write(trace, dist.get_rank())
    finally:
        run.undo()


def _parts(program: Program) -> tuple[list[nn.Module], dict[str, nn.Parameter]]:
    return program.modules, dict(program.named_parameters())


def _own_parts(program: OwnProgram) -> tuple[list[nn.Module], dict[str, nn.Parameter]]:
    return list(program.modules), program.parameters
