"""A drill on the terminal: one row a fault, wrong ones with what was found instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paralign.config.run import RunConfig
from paralign.prove.drill_report import DrillReport, FaultOutcome
from paralign.prove.fault import Fault, only_fitting

_STYLES = {
    "right": "green",
    "misnamed": "yellow",
    "mislocated": "yellow",
    "missed": "bold red",
    "inert": "dim",
}


def render(report: DrillReport, *, quiet: bool = False, verbose: bool = False) -> RenderableType:
    """Return the table of a drill and its last line.

    Args:
        report: What to show.
        quiet: The last line alone.
        verbose: With what each fault is, and what the config lacks for those that were left out.
    """
    last = Text(sentence(report), "bold green" if report.exit_status == 0 else "bold red")
    if quiet:
        return last
    parts: list[RenderableType] = [_table(report.outcomes, verbose=verbose)]
    if report.skipped:
        parts.append(Text(_skipped(report, verbose=verbose), "dim"))
    return Group(*parts, last)


def sentence(report: DrillReport) -> str:
    """Return the whole drill in one line."""
    numbers = report.summary
    active = numbers["active"]
    if report.clean.verdict != "aligned":
        return (
            f"NOT DRILLED: without a fault the run is {report.clean.verdict} already: "
            f"{report.clean.why}. Mend that first."
        )
    text = (
        f"{numbers['caught']} of {active} faults caught; component and axes right in "
        f"{_share(numbers['component_and_axes'], active)}, cause in "
        f"{_share(numbers['cause'], active)}"
    )
    if numbers["inert"]:
        text += f"; {numbers['inert']} more changed no number"
    return f"{text}; {report.seconds:.0f} s."


def render_list(faults: Iterable[Fault], config: RunConfig) -> RenderableType:
    """Return every fault with what it breaks, and what ``config`` lacks for it."""
    fitting, _ = only_fitting(faults := list(faults), config)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("family", "fault", "breaks", "here"):
        table.add_column(heading)
    for fault in faults:
        here = "" if fault in fitting else f"needs {', '.join(fault.lacks(config))}"
        style = "" if fault in fitting else "dim"
        table.add_row(
            *(Text(text, style) for text in (fault.family, fault.name, fault.description, here))
        )
    return table


def _table(outcomes: Sequence[FaultOutcome], *, verbose: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("fault", "", "is", "found"):
        table.add_column(heading)
    for outcome in outcomes:
        fault, word = outcome.fault, outcome.word
        name = Text(fault.name)
        if verbose:
            name.append(f"\n{fault.description}", "dim")
        table.add_row(
            name,
            Text(word, _STYLES[word]),
            Text(words(fault.component, fault.axes, fault.cause)),
            Text(found(outcome), "" if word == "right" else _STYLES[word]),
        )
    return table


def words(component: str, axes: Iterable[str], cause: str) -> str:
    """Write what a finding names: ``reduction cp missing_reduction``."""
    return " ".join([component, *([" x ".join(sorted(axes))] if axes else []), cause])


def found(outcome: FaultOutcome) -> str:
    """Write what was found; empty where that is exactly what the fault is."""
    if outcome.error is not None:
        return f"ended the run: {str(outcome.error).splitlines()[0]}"
    if not outcome.findings:
        return "" if outcome.inert else "nothing"
    first = outcome.findings[0]
    text = words(first.component, first.axes, first.cause)
    if first.candidates:
        text += f"; candidates {', '.join(first.candidates)}"
    if len(outcome.findings) > 1:
        text += f"; and {len(outcome.findings) - 1} more"
    return text


def _skipped(report: DrillReport, *, verbose: bool) -> str:
    if not verbose:
        lacks = sorted({lack for _, what in report.skipped for lack in what})
        return f"{len(report.skipped)} faults left out: this config lacks {', '.join(lacks)}."
    lines = [f"{name}: lacks {', '.join(lacks)}" for name, lacks in report.skipped]
    return "\n".join(["left out:", *lines])


def _share(number: int, total: int) -> str:
    return f"{100 * number / total:.0f} %" if total else "none"
