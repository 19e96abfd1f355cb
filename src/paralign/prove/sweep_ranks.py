"""What every rank of a sweep does: one run for each mesh and schedule, in one world."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from paralign.config.run import RunConfig
from paralign.launch import report_event
from paralign.prove.one_world import RunDone
from paralign.prove.parallel import run_parallel
from paralign.train.build import Numerics


def run_cells(
    names: Sequence[str],
    configs: Mapping[str, RunConfig],
    precision: Numerics,
    folder: Path,
) -> None:
    """Record one run for each name into the folder of that name.

    Args:
        names: Cells, in order.
        configs: The config of each cell.
        precision: Their dtypes.
        folder: Where the traces go.
    """
    for name in names:
        began = time.perf_counter()
        run_parallel(configs[name], precision, folder / name, references=folder)
        gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            report_event(RunDone(name, time.perf_counter() - began))
