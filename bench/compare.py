"""Cost of a comparison against the runs that it compares.

    python -m bench.compare [--rounds 3] [--check]

``align`` runs in this process, so that neither side pays for starting Python; what its report says
about its own phases is printed. The runs are the example and a model of 13 million parameters, once
in fp64 and once in fp32, where a third run is read and counted: the fp64 truth.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._rounds import Times, median_ratio, median_seconds
from paralign.config.load import load_config
from paralign.config.run import RunConfig
from paralign.prove.run import align

TARGET = 0.25
EXAMPLE = Path("examples", "pp_fsdp_cp.yaml")
MODELS: dict[str, Sequence[str]] = {
    "example": (),
    "small, float64": ("model.preset=small", "batch.seq_len=256"),
    "small, float32": ("model.preset=small", "batch.seq_len=256", "align.dtype=float32"),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Phases of each round, and how much was compared."""

    rounds: list[Times]
    num_elements: int

    @property
    def ratio(self) -> float:
        """Time of the comparison by that of the runs."""
        return median_ratio(self.rounds, "compare", "runs")


def measure(config: RunConfig, rounds: int) -> Cost:
    """Align ``rounds`` times.

    Raises:
        RuntimeError: A run was not aligned, so that its comparison may have stopped early.
    """
    times = []
    report: Any = None
    for _ in range(rounds):
        report = align(config, timeout=600)
        if report.verdict != "aligned":
            raise RuntimeError(f"the runs are {report.verdict}: {report.why}")
        phases = report.timings
        truth = phases.get("truth_s", 0.0)
        times.append(
            {
                "reference": phases["reference_s"],
                "parallel": phases["parallel_s"],
                "truth": truth,
                "compare": phases["compare_s"],
                "runs": phases["reference_s"] + phases["parallel_s"] + truth,
            }
        )
    return Cost(rounds=times, num_elements=report.coverage.elements)


def main() -> int:
    """Measure, print, and judge with ``--check``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--check", action="store_true", help=f"exit 1 at or above {TARGET:.0%}")
    options = parser.parse_args()
    # Before torch is imported: threads that wait must not spin, or on a machine that does other
    # work too the times are those of the spinning.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    measure(load_config(EXAMPLE), 1)  # the first run waits until torch has been imported
    print(
        f"medians of {options.rounds} rounds; "
        f"target: compare / (reference + parallel + truth) < {TARGET}"
    )
    print("run                   elements   reference    parallel       truth     compare   ratio")
    passed = []
    for name in options.only:
        cost = measure(load_config(EXAMPLE, MODELS[name]), options.rounds)
        phases = ("reference", "parallel", "truth", "compare")
        seconds = "   ".join(f"{median_seconds(cost.rounds, phase):7.2f} s" for phase in phases)
        print(f"{name:16}   {cost.num_elements:11,}   {seconds}   {cost.ratio:5.3f}", flush=True)
        passed.append(cost.ratio < TARGET)
    return 1 if options.check and not all(passed) else 0


if __name__ == "__main__":
    raise SystemExit(main())
