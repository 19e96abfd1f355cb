"""Wall time of ``paralign align`` from a cold shell, against torchrun for its parallel part alone.

    python -m bench.align_start [CONFIG] [--rounds 3] [--check]

Both sides are new processes, in turn. ``paralign align`` starts Python, reads the config, makes the
reference run and the parallel run, compares them and prints the report. torchrun starts as many
ranks, and each only builds the same program and trains the same steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench._rounds import Times, median_ratio, median_seconds, turns
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


def measure(sides: Mapping[str, Sequence[str]], rounds: int) -> list[Times]:
    """Run each side once a round and return the seconds.

    Raises:
        RuntimeError: A command failed; its output is in the message.
    """
    return [
        {side: _seconds(sides[side]) for side in turns(list(sides), number)}
        for number in range(rounds)
    ]


def _seconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return seconds


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true", help=f"exit 1 above {TARGET:.0%}")
    options = parser.parse_args()
    num_ranks = load_config(options.config).mesh.degrees.world_size
    with tempfile.TemporaryDirectory(prefix="paralign-bench-") as folder:
        rounds = measure(commands(options.config, num_ranks, Path(folder, "t")), options.rounds)
    print(f"{options.config}, {num_ranks} ranks, from a cold shell")
    print("round   paralign align   torchrun, parallel part   ratio")
    for number, times in enumerate(rounds):
        ratio = times["align"] / times["torchrun"]
        print(f"{number:5}   {times['align']:12.2f} s   {times['torchrun']:21.2f} s   {ratio:5.3f}")
    ratio = median_ratio(rounds, "align", "torchrun")
    align, torchrun = (median_seconds(rounds, side) for side in ("align", "torchrun"))
    print(f"median  {align:12.2f} s   {torchrun:21.2f} s   {ratio:5.3f}   (target {TARGET:.2f})")
    return 1 if options.check and not ratio <= TARGET else 0


if __name__ == "__main__":
    raise SystemExit(main())
