"""The parallel part of ``paralign align`` alone, for torchrun: build, train, record; no comparison.

torchrun --nproc_per_node=8 -m bench._parallel_part RUN.yaml TRACE
"""

from __future__ import annotations

import sys
from pathlib import Path

from paralign.config.load import load_config
from paralign.launch import current_world, join_world
from paralign.prove.parallel import run_parallel
from paralign.train.build import numerics


def main() -> int:
    """Run it on the rank that torchrun started."""
    path, trace = sys.argv[1:]
    world = current_world()
    assert world is not None, "start this with torchrun"
    config = load_config(Path(path), world_size=world.world_size)
    with join_world(config.device):
        run_parallel(config, numerics(config.align.dtype or "float64", config), Path(trace))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
