"""What ``paralign check`` costs from a cold shell, on a mesh that no machine here has.

    python -m bench.check [CONFIG] [--rounds 3] [--check]

Every round is a new process: Python starts, torch is imported, the model is built on the meta
device, and each rank's memory and traffic are worked out. No rank is started.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from pathlib import Path

from bench._process import run

SECONDS = 10.0
GIGABYTES = 2.0
LIMIT_S = 300.0
EXAMPLE = Path("examples", "pangu_moe_full.yaml")


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit 1 above the targets")
    options = parser.parse_args()
    command = [sys.executable, "-m", "paralign", "check", str(options.config)]
    costs = [run(command, limit=LIMIT_S) for _ in range(options.rounds)]
    median = statistics.median(cost.seconds for cost in costs)
    processor = statistics.median(cost.cpu_seconds for cost in costs)
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20  # the largest's
    print(f"paralign check {options.config}, median of {options.rounds}")
    print(f"by the clock    {median:6.2f} s   (target {SECONDS:.0f} s)")
    print(f"processor time  {processor:6.2f} s")
    print(f"peak memory     {gigabytes:6.2f} GB  (target {GIGABYTES:.0f} GB)")
    return 1 if options.check and not (median <= SECONDS and gigabytes <= GIGABYTES) else 0


if __name__ == "__main__":
    sys.exit(main())
