"""A drill as cases, for JUnit and the page: one per fault, a fault that was missed has failed."""

from __future__ import annotations

from paralign.align.report.case import (
    FAILED,
    PASSED,
    SKIPPED,
    Case,
    CaseList,
    explain,
)
from paralign.commands.drill_table import found, sentence, words
from paralign.prove.drill_report import DrillReport, FaultOutcome


def cases_of_drill(report: DrillReport) -> CaseList:
    """Return one case per fault. Inert faults, and those the config has no place for, are skipped.

    A fault that was caught but not named rightly has passed, as in the exit status; the page says
    what was found.
    """
    left_out = [
        Case(name=name, outcome=SKIPPED, message=f"this config lacks {', '.join(lacks)}")
        for name, lacks in report.skipped
    ]
    return CaseList(
        title="paralign drill",
        verdict="drilled" if report.exit_status == 0 else "not passed",
        outcome=PASSED if report.exit_status == 0 else FAILED,
        why=sentence(report).rstrip("."),
        cases=(_clean(report), *map(_case, report.outcomes), *left_out),
        facts={"config": report.config, "mesh": report.mesh, "dtype": report.dtype},
    )


def _clean(report: DrillReport) -> Case:
    outcome = PASSED if report.clean.verdict == "aligned" else FAILED
    return Case(
        name="no fault",
        outcome=outcome,
        message=report.clean.why,
        seconds=sum(report.clean.timings.values()),
        columns={"named": report.clean.verdict},
    )


def _case(outcome: FaultOutcome) -> Case:
    fault = outcome.fault
    is_right = outcome.word == "right"
    told = found(outcome)
    expected = words(fault.component, fault.axes, fault.cause)
    if outcome.inert:
        message = "changes no number in this run: there is nothing to catch"
    elif is_right:
        message = f"found: {expected}"
    else:
        message = f"{outcome.word}: it is {expected}; found {told}"
    return Case(
        name=fault.name,
        outcome=SKIPPED if outcome.inert else PASSED if outcome.caught else FAILED,
        message=message,
        text="\n\n".join([fault.description, *map(explain, outcome.findings)]),
        columns={"named": outcome.word, "breaks": fault.description},
    )
