"""Wall time of ``paralign align`` from a cold shell, against torchrun for its parallel part alone.

    python -m bench.align_start [CONFIG] [--rounds 3] [--check]

Both sides are new processes, in turn. ``paralign align`` starts Python, reads the config, makes the
reference run and the parallel run, compares them and prints the verdict. torchrun starts as many
ranks, and each only builds the same program and trains and records the same steps. On a machine
that does other work too the clock favours torchrun, whose eight processes get more than their share
of it: then look at the processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._process import Cost, run
from bench._rounds import median_ratio, median_seconds, turns
from paralign.config.load import load_config

TARGET = 0.50
EXAMPLE = Path("examples", "pp_fsdp_cp.yaml")
LIMIT_S = 900.0


def commands(config: Path, num_ranks: int, trace: Path) -> dict[str, list[str]]:
    """Return both sides' command lines."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    part = ["-m", "bench._parallel_part", str(config), str(trace)]
    return {
        "align": [sys.executable, "-m", "paralign", "align", str(config), "--quiet"],
        "torchrun": [sys.executable, *launcher, *part],
    }


def measure(sides: Mapping[str, Sequence[str]], rounds: int) -> list[dict[str, Cost]]:
    """Run each side once a round, in an order that changes."""
    return [
        {side: run(sides[side], limit=LIMIT_S) for side in turns(list(sides), number)}
        for number in range(rounds)
    ]


def report(rounds: Sequence[Mapping[str, Cost]]) -> float:
    """Print the table; return the median ratio of times."""
    print("round   paralign align   torchrun, parallel part   ratio    processor time of both")
    for number, costs in enumerate(rounds):
        align, torchrun = costs["align"], costs["torchrun"]
        print(
            f"{number:5}   {align.seconds:12.2f} s   {torchrun.seconds:21.2f} s   "
            f"{align.seconds / torchrun.seconds:5.3f}    "
            f"{align.cpu_seconds:.1f} s / {torchrun.cpu_seconds:.1f} s"
        )
    wall = [{side: cost.seconds for side, cost in costs.items()} for costs in rounds]
    cpu = [{side: cost.cpu_seconds for side, cost in costs.items()} for costs in rounds]
    ratio = median_ratio(wall, "align", "torchrun")
    print(
        f"median  {median_seconds(wall, 'align'):12.2f} s   "
        f"{median_seconds(wall, 'torchrun'):21.2f} s   {ratio:5.3f}    "
        f"ratio {median_ratio(cpu, 'align', 'torchrun'):.3f}   (target {TARGET:.2f})"
    )
    return ratio


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {TARGET:.0%}")
    options = parser.parse_args()
    num_ranks = load_config(options.config).mesh.degrees.world_size
    print(f"{options.config}, {num_ranks} ranks, from a cold shell")
    with tempfile.TemporaryDirectory(prefix="paralign-bench-") as folder:
        rounds = measure(commands(options.config, num_ranks, Path(folder, "t")), options.rounds)
    ratio = report(rounds)
    return 1 if options.check and not ratio <= TARGET else 0


if __name__ == "__main__":
    raise SystemExit(main())
