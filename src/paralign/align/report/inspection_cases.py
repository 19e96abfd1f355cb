"""An inspection as cases: one per check, with its findings and their fixes."""

from __future__ import annotations

from paralign.align.inspect.report import CLEAN, FINDINGS, INCONCLUSIVE, Check, InspectReport
from paralign.align.report.case import (
    FAILED,
    PASSED,
    SKIPPED,
    UNDECIDED,
    Case,
    CaseList,
    explain,
)

_OUTCOMES = {CLEAN: PASSED, FINDINGS: FAILED, INCONCLUSIVE: UNDECIDED}


def cases_of_inspection(report: InspectReport) -> CaseList:
    """Return one case per check. A check that could judge nothing is skipped, and says why."""
    return CaseList(
        title="paralign inspect",
        verdict=report.verdict,
        outcome=_OUTCOMES[report.verdict],
        why=report.why,
        cases=tuple(_case(check) for check in report.checks),
        facts={
            "trace": report.trace,
            "mesh": report.mesh,
            "dtype": report.dtype,
            "timings": report.timings,
            **({"notes": report.notes} if report.notes else {}),
        },
    )


def _case(check: Check) -> Case:
    columns = {"looked at": str(check.looked_at)}
    if check.findings:
        first = check.findings[0]
        more = len(check.findings) - 1
        message = f"{first.component}: {first.cause}" + (f", and {more} more" if more else "")
        text = "\n\n".join(explain(finding) for finding in check.findings)
        return Case(name=check.name, outcome=FAILED, message=message, text=text, columns=columns)
    outcome = PASSED if check.looked_at else SKIPPED
    return Case(
        name=check.name, outcome=outcome, message=check.why_not or "nothing found", columns=columns
    )
