"""Runs the full product of the matrix and writes it as a table.

    python -m tests.equivalence.table docs/matrix.md [--results FILE]

``--results`` keeps one line a case, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from paralign.parallel.stages import SCHEDULES
from tests.equivalence.cases import Case, legal_cases, meshes
from tests.parity import AFTER_STEP_TOLERANCE, EPS, GRAD_TOLERANCE, check_result, measure_all

CASES_PER_WORLD = 25

INTRODUCTION = """\
# The matrix

Every factorisation of eight ranks into pp x dp_replicate x dp_shard x cp, with every schedule, unit
grouping, attention mode and micro-batch count that is legal: {num_cases} runs of one AdamW step in
float64, each compared with one device. Models, tied embeddings and layer counts that do not divide
alternate over them; padding is uneven, biases are not zero, and llama has two key heads. Generated
by `python -m tests.equivalence.table docs/matrix.md` with torch {torch}, {date}; not typed.

A cell says how many runs, and the worst relative Frobenius error of any parameter's gradient in eps
(tolerance {grad:.0f} eps). Over all runs the worst error of a parameter, update or moment after the
step is {after:.1e} (tolerance {after_tolerance:.0e}), and {num_failures} runs failed.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the table and return 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument("--results", type=Path, help="one JSON line a case; kept and continued")
    options = parser.parse_args(arguments)
    known = _read(options.results)
    cases = list(legal_cases())
    began = time.monotonic()
    for mesh in meshes():
        missing = [c for c in cases if c.mesh == mesh and c.id not in known]
        for start in range(0, len(missing), CASES_PER_WORLD):
            for result in run(missing[start : start + CASES_PER_WORLD]):
                known[str(result["id"])] = result
                if options.results is not None:
                    with options.results.open("a") as file:
                        file.write(json.dumps(result) + "\n")
            took = time.monotonic() - began
            sys.stderr.write(f"{len(known)} of {len(cases)}, {took:.0f} s\n")
    results = [known[case.id] for case in cases]
    options.table.write_text(render(cases, results))
    return int(any(result["why"] for result in results))


def run(cases: Sequence[Case]) -> Iterable[dict[str, object]]:
    """Run cases of one mesh in one world; yield numbers and, where one failed, why."""
    for case, result in zip(
        cases, measure_all([case.config() for case in cases], timeout=300), strict=True
    ):
        why = ""
        try:
            check_result(result)
        except AssertionError as error:
            why = str(error)
        yield {
            "id": case.id,
            "grad_eps": result.worst("grad:0")[0] / EPS,
            "after": result.worst("param", "update", "moment")[0],
            "why": why,
        }


def render(cases: Sequence[Case], results: Sequence[dict[str, object]]) -> str:
    """Return the table as Markdown."""
    schedules = [kind.name for kind in SCHEDULES.values()]
    lines = [
        "| pp x dp_replicate x dp_shard x cp | " + " | ".join(schedules) + " |",
        "|---" * (len(schedules) + 1) + "|",
    ]
    for mesh in meshes():
        cells = []
        for schedule in schedules:
            chosen = [
                result
                for case, result in zip(cases, results, strict=True)
                if case.mesh == mesh and case.schedule == schedule
            ]
            worst = max((float(str(r["grad_eps"])) for r in chosen), default=0.0)
            failed = sum(bool(r["why"]) for r in chosen)
            note = f", **{failed} failed**" if failed else ""
            cells.append(f"{len(chosen)}: {worst:.1f}{note}" if chosen else "-")
        lines.append(f"| {' x '.join(map(str, mesh))} | " + " | ".join(cells) + " |")
    failures = [result for result in results if result["why"]]
    if failures:
        lines += ["", "Failed:", "", *(f"- `{r['id']}`: {r['why']}" for r in failures)]
    head = INTRODUCTION.format(
        num_cases=len(results),
        torch=torch.__version__,
        date=time.strftime("%Y-%m-%d"),
        grad=GRAD_TOLERANCE / EPS,
        after=max(float(str(r["after"])) for r in results),
        after_tolerance=AFTER_STEP_TOLERANCE,
        num_failures=len(failures),
    )
    return head + "\n".join(lines) + "\n"


def _read(path: Path | None) -> dict[str, dict[str, object]]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["id"]: line for line in lines}


if __name__ == "__main__":
    raise SystemExit(main())
