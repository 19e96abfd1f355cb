"""Show an inspection on a terminal, and as cases for JUnit and the page: one for each check."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from paralign.align.inspect.report import CLEAN, FINDINGS, INCONCLUSIVE, Check, InspectReport
from paralign.align.report.case import FAILED, PASSED, SKIPPED, UNDECIDED, Case, CaseList, explain
from paralign.align.report.terminal import render_findings

_STYLES = {CLEAN: "bold green", FINDINGS: "bold red", INCONCLUSIVE: "bold yellow"}
_OUTCOMES = {CLEAN: PASSED, FINDINGS: FAILED, INCONCLUSIVE: UNDECIDED}
_NOTES = 5


def render(report: InspectReport, *, verbose: bool = False) -> RenderableType:
    """Return the report as something rich can print.

    Args:
        report: The result of an inspection.
        verbose: Show all notes, and what each check looked at.
    """
    parts: list[RenderableType] = [_headline(report), Text(f"{report.why}.")]
    if report.findings:
        parts += [Text(""), *render_findings(report.findings)]
    silent = [check for check in report.checks if check.why_not]
    if silent:
        parts += [Text(""), Text("could not judge, or not everything:", style="bold")]
        parts += [Text(f"   {check.name}: {check.why_not}") for check in silent]
    if report.notes:
        shown = report.notes if verbose else report.notes[:_NOTES]
        parts += [Text(""), Text("to know:", style="bold")]
        parts += [Text(f"   {note}") for note in shown]
        if len(shown) < len(report.notes):
            rest = len(report.notes) - len(shown)
            parts.append(Text(f"   ... and {rest} more (-v shows all)", style="dim"))
    if verbose:
        parts += [Text(""), Text("looked at:", style="bold")]
        parts += [
            Text(f"   {check.name}: {check.looked_at} things, {len(check.findings)} findings")
            for check in report.checks
        ]
    return Group(*parts)


def cases_of(report: InspectReport) -> CaseList:
    """Return one case for each check."""
    return CaseList(
        title="paralign inspect",
        verdict=report.verdict,
        outcome=_OUTCOMES[report.verdict],
        why=report.why,
        cases=tuple(_case(check) for check in report.checks),
        facts={"trace": report.trace, "ranks": report.world_size, "mesh": report.mesh},
    )


def _case(check: Check) -> Case:
    columns = {"looked at": str(check.looked_at), "findings": str(len(check.findings))}
    if check.findings:
        first = check.findings[0]
        return Case(
            name=check.name,
            outcome=FAILED,
            message=f"{first.component}: {first.cause}",
            text="\n\n".join(explain(finding) for finding in check.findings),
            columns=columns,
        )
    if not check.looked_at:
        why = check.why_not or "nothing to look at"
        return Case(name=check.name, outcome=SKIPPED, message=why, columns=columns)
    return Case(
        name=check.name, outcome=PASSED, message=check.why_not or "no finding", columns=columns
    )


def _headline(report: InspectReport) -> Text:
    mesh = " ".join(f"{axis}={size}" for axis, size in report.mesh.items() if size > 1)
    facts = [f"{report.world_size} ranks" if report.world_size > 1 else "1 rank"]
    facts += [mesh] if mesh else []
    facts += [report.dtype, f"{sum(report.timings.values()):.1f} s"]
    line = Text(report.verdict.upper(), style=_STYLES[report.verdict])
    line.append("  " + " | ".join(facts), style="default not bold")
    return line
