"""Show a report on a terminal: the verdict, what is wrong, then the worst tensors first.

Names come from the user's model and may look like markup, so everything is built from ``Text``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paralign.align.report.case import candidates_of, place_of
from paralign.align.report.choices import choices_line, router_lines
from paralign.align.report.numbers import expected_and_found, finite, short
from paralign.align.report.place import places
from paralign.align.verdict import (
    ALIGNED,
    INCONCLUSIVE,
    MISALIGNED,
    ZERO_IN_THEORY,
    Finding,
    Report,
    TensorRow,
)

_STYLES = {ALIGNED: "bold green", MISALIGNED: "bold red", INCONCLUSIVE: "bold yellow"}
_ROWS = 10
_SKIPPED = 5


def print_report(report: Report, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print ``report``.

    Args:
        report: The result of a comparison.
        console: Where to; default: standard output, without colour unless it is a terminal.
        verbose: Show every tensor with its worst element, and everything that was skipped.
    """
    (console or Console(highlight=False)).print(render(report, verbose=verbose))


def render(report: Report, *, verbose: bool = False) -> RenderableType:
    """Return the report as something rich can print."""
    parts: list[RenderableType] = [_headline(report), Text(f"{report.why}.")]
    if report.findings:
        parts += [Text(""), *render_findings(report.findings)]
    if report.located is not None and report.located["isolated"] is not None:
        parts += [Text(""), _isolated(report.located["isolated"])]
    if report.routing is not None:
        parts += [Text(""), Text(choices_line(report.routing))]
        parts += [
            Text(f"   {line}", style="dim" if verbose else "red")
            for line in router_lines(report.routing, every=verbose)
        ]
    if report.coverage.skipped:
        parts += [Text(""), _skipped(report, verbose)]
    if report.tensors:
        parts += [Text(""), _table(report, verbose)]
    if report.notes and verbose:
        parts += [Text("also different, as it may be:", style="dim")]
        parts += [Text(f"  {note}", style="dim") for note in report.notes]
    return Group(*parts)


def _headline(report: Report) -> Text:
    """Everything that matters on one line: verdict, loss, coverage, worst, time."""
    coverage, worst = report.coverage, report.worst
    facts = []
    if report.loss is not None:
        facts.append(f"loss {report.loss['parallel']:.6g} (rel {short(report.loss['rel'])})")
    facts.append(f"{coverage.compared}/{coverage.parameters} parameters")
    if worst is not None:
        facts.append(f"worst {short(worst.eps)} eps")
    facts.append(report.dtype + (" (uncalibrated)" if report.yardstick == "uncalibrated" else ""))
    facts.append(f"{sum(report.timings.values()):.1f} s")
    line = Text(report.verdict.upper(), style=_STYLES[report.verdict])
    line.append("  " + " | ".join(facts), style="default not bold")
    return line


def render_findings(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Yield every finding with its fix, numbered."""
    for number, finding in enumerate(findings, start=1):
        over = f" over {', '.join(finding.axes)}" if finding.axes else ""
        title = Text(f"{number}. {finding.component}: {finding.cause}{over}", style="bold")
        if finding.tensor:
            title.append(f"  {finding.tensor}", style="cyan not bold")
        yield title
        lines = [finding.fix]
        if place := place_of(finding):
            lines.append(place)
        lines += candidates_of(finding)
        if finding.separate_by:
            lines.append(f"To tell them apart: {finding.separate_by.rstrip('.')}.")
        if changed := _evidence(finding):
            lines.append(changed)
        yield _Indented("\n".join(lines))


class _Indented:
    """A paragraph below its title: wrapped to a terminal, uncut where lines may be of any length.

    Rich's padding alone would cut long lines in a pipe, and with them the end of the fix.
    """

    def __init__(self, text: str, by: int = 3) -> None:
        self.text, self.by = text, by

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.no_wrap:
            yield Text("\n".join(" " * self.by + line for line in self.text.splitlines()))
        else:
            yield Padding(Text(self.text), (0, 0, 0, self.by))


def _evidence(finding: Finding) -> str:
    """The proof in one line: what the error was, and what is left once the cause is taken out."""
    before, after = (finding.evidence.get(f"eps_{when}") for when in ("before", "after"))
    if not isinstance(before, int | float) or not isinstance(after, int | float):
        return ""
    if not math.isfinite(after):
        return ""
    return f"Taken out, {short(float(before))} eps become {short(float(after))}."


def _isolated(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What is wrong given all that came before it: no consequence of anything else."""
    if not found:
        return Text("every module is right, given what came before it", style="bold")
    lines: list[RenderableType] = [Text("wrong by itself, given what came before:", style="bold")]
    for item in found:
        line = f":{item['line']}" if item["line"] else ""
        place = f" ({item['file']}{line})" if item["file"] else ""
        text = Text.assemble("   ", (item["name"] or "the model", "cyan"))
        text.append(f"  {item['kind']} of a {item['class']}{place}, {short(item['eps'])} eps")
        lines.append(text)
    return Group(*lines)


def _skipped(report: Report, verbose: bool) -> RenderableType:
    skipped = report.coverage.skipped
    shown = skipped if verbose else skipped[:_SKIPPED]
    lines: list[RenderableType] = [Text(f"not compared: {len(skipped)}", style="bold")]
    lines += [Text.assemble("   ", (item["name"], "cyan"), f"  {item['why']}") for item in shown]
    if len(shown) < len(skipped):
        lines.append(
            Text(f"   ... and {len(skipped) - len(shown)} more (-v shows all)", style="dim")
        )
    return Group(*lines)


def _table(report: Report, verbose: bool) -> RenderableType:
    ordered = sorted(report.tensors, key=lambda row: (row.ok, -row.strain, -finite(row.eps)))
    shown = ordered if verbose else ordered[:_ROWS]
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), expand=True
    )
    table.add_column("kind", no_wrap=True)
    table.add_column("name", ratio=1, overflow="fold")
    for title in ("step", "eps", "budget", "cosine", "scale"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(*_cells(row, with_worst=verbose or not row.ok))
    more = "" if len(shown) == len(ordered) else f" {len(shown)} of {len(ordered)}; -v shows all"
    base = "the fp64 truth" if report.yardstick == "truth" else "the reference"
    note = (
        f"worst first,{more or ' all'}. eps: distance from {base} in {report.dtype} rounding units."
    )
    if any(row.worst_values is not None and (verbose or not row.ok) for row in shown):
        note += "\nUnder a name: its worst element, expected -> found, and ranks with a wrong part."
    if any(row.category == ZERO_IN_THEORY for row in shown):
        note += "\n(*) zero in theory: in units of the global gradient norm; listed after a step."
    return Group(table, Text(""), Text(note, style="dim"))


def _cells(row: TensorRow, *, with_worst: bool) -> list[Text]:
    style = "" if row.ok else "red"
    name = Text(row.label, style="cyan" if row.ok else "bold red")
    if row.category == ZERO_IN_THEORY:
        name.append(" (*)", style="dim")
    if with_worst and row.worst_values is not None:
        name.append("\n" + _worst(row), style="dim not bold")
    budget = "listed" if row.budget_eps is None else short(row.budget_eps)
    return [
        Text(row.kind, style=style),
        name,
        Text(str(row.step)),
        Text(short(row.eps), style=style),
        Text(budget, style="dim"),
        Text("-" if row.cosine is None else f"{row.cosine:.4f}"),
        Text("-" if row.scale is None else f"{row.scale:.6g}"),
    ]


def _worst(row: TensorRow) -> str:
    assert row.worst_values is not None, "a row without it has no such line"
    at = "" if row.worst_index is None else f"at {list(row.worst_index)}: "
    text = at + expected_and_found(row.worst_values)
    if row.ranks_off:
        few = ", ".join(map(str, row.ranks_off[:6]))
        text += f", rank {few}{', ...' if len(row.ranks_off) > 6 else ''}"
    if row.profile is not None and (found := places(row.profile)):
        text += "\n" + "; ".join(found)
    return text
