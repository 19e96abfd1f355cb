"""A sweep as cases, for JUnit and the page: one per mesh and schedule."""

from __future__ import annotations

from paralign.align.report.case import FAILED, PASSED, SKIPPED, UNDECIDED, Case, CaseList
from paralign.align.report.numbers import short
from paralign.commands.sweep_table import sentence
from paralign.prove.sweep import CellResult, SweepReport

_OUTCOMES = {
    "aligned": PASSED,
    "misaligned": FAILED,
    "failed": FAILED,
    "inconclusive": UNDECIDED,
    "refused": SKIPPED,
    "not run": SKIPPED,
}
_VERDICTS = {
    0: ("aligned", PASSED),
    1: ("misaligned", FAILED),
    3: ("failed", FAILED),
    4: ("inconclusive", UNDECIDED),
}


def cases_of_sweep(report: SweepReport) -> CaseList:
    """Return one case per cell; what is refused or was not run is skipped."""
    verdict, outcome = _VERDICTS[report.exit_status]
    return CaseList(
        title="paralign sweep",
        verdict=verdict,
        outcome=outcome,
        why=sentence(report).rstrip("."),
        cases=tuple(_case(cell) for cell in report.cells),
        facts={"config": report.config, "dtype": report.dtype, "subset": report.subset},
    )


def _case(cell: CellResult) -> Case:
    return Case(
        name=cell.name,
        outcome=_OUTCOMES[cell.verdict],
        message=cell.why or cell.verdict,
        text=cell.fix,
        seconds=cell.seconds or 0.0,
        columns={
            "mesh": " ".join(f"{axis}{n}" for axis, n in cell.mesh.items() if n > 1) or "one rank",
            "schedule": cell.schedule,
            "worst eps": "" if cell.worst_eps is None else short(cell.worst_eps),
        },
    )
