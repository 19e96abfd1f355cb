"""Drills as a Markdown page: what was broken, what was found, and how often that was right."""

from __future__ import annotations

from collections.abc import Mapping

from paralign.commands.drill_table import found, sentence, words
from paralign.prove.drill_report import DrillReport

_HEAD = """\
# What `paralign drill` catches

Written by `python -m bench.drill docs/drill.md`; not to be edited. Every fault is injected alone
into a run that is aligned without it. *right*: the first finding names component, axes and cause.
*misnamed*: component and axes are right, the cause is not. *mislocated*: caught, but component or
axes are not right. *inert*: the fault changed no number, so there is nothing to catch. Where the
numbers cannot tell causes apart, a candidate counts if the finding names the run that would;
`separated` is such a run that the drill has made by itself.
"""


def render_page(reports: Mapping[str, DrillReport]) -> str:
    """Return the page for the drills of several configs.

    Args:
        reports: Name of a config -> its drill.
    """
    total = {"active": 0, "caught": 0, "component_and_axes": 0, "cause": 0}
    for report in reports.values():
        for key in total:
            total[key] += report.summary[key]
    lines = [_HEAD, "| all configs | faults | share |", "|---|---|---|"]
    for key, meaning in (
        ("caught", "caught"),
        ("component_and_axes", "component and axes right"),
        ("cause", "cause right as well"),
    ):
        share = f"{100 * total[key] / total['active']:.1f} %" if total["active"] else "none"
        lines.append(f"| {meaning} | {total[key]} of {total['active']} | {share} |")
    for name, report in reports.items():
        lines += ["", *_section(name, report)]
    return "\n".join(lines) + "\n"


def _section(name: str, report: DrillReport) -> list[str]:
    axes = ", ".join(f"{axis}={size}" for axis, size in report.mesh.items() if size > 1)
    lines = [f"## {name}", "", f"{axes}, {report.dtype}. {sentence(report)}", ""]
    lines += ["| fault | breaks | is | verdict | found |", "|---|---|---|---|---|"]
    for outcome in report.outcomes:
        fault = outcome.fault
        told = "" if outcome.word == "right" else found(outcome)
        if outcome.separated_by:
            told = f"{told}{'; ' if told else ''}separated: {outcome.separated_by}"
        is_ = words(fault.component, fault.axes, fault.cause)
        cells = (f"`{fault.name}`", fault.description, is_, outcome.word, told)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return lines


def _cell(text: str) -> str:
    """Keep a text in one cell of a Markdown table."""
    plain = text.encode("ascii", "replace").decode()
    return " ".join(plain.split()).replace("|", "\\|")
