"""A sweep on the terminal: meshes down, schedules across, a verdict in each cell."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paralign.prove.sweep import CellResult, SweepReport

_STYLES = {
    "aligned": "green",
    "misaligned": "bold red",
    "failed": "bold red",
    "inconclusive": "yellow",
    "refused": "dim",
    "not run": "dim",
}


def render(report: SweepReport, *, quiet: bool = False, verbose: bool = False) -> RenderableType:
    """Return the matrix, the reasons below it, and its last line.

    Args:
        report: What to show.
        quiet: The last line alone.
        verbose: With the reason of every refused cell.
    """
    good = report.exit_status == 0
    last = Text(sentence(report), "bold green" if good else "bold red")
    if quiet:
        return last
    parts: list[RenderableType] = [_matrix(report)]
    told = [cell for cell in report.cells if cell.why and _is_told(cell, verbose)]
    parts += [
        Text(f"{cell.name}: {cell.verdict}: {cell.why}", _STYLES[cell.verdict]) for cell in told
    ]
    if not verbose and any(cell.verdict == "refused" for cell in report.cells):
        parts.append(Text("refused: no legal run, -v says why.", "dim"))
    return Group(*parts, last)


def sentence(report: SweepReport) -> str:
    """Return the whole sweep in one line."""
    counts = report.summary
    ran = [f"{counts[v]} {v}" for v in _STYLES if counts.get(v) and v not in ("refused", "not run")]
    left = [f"{counts[v]} {v}" for v in ("refused", "not run") if counts.get(v)]
    worst = max((c.worst_eps for c in report.cells if c.worst_eps is not None), default=None)
    text = f"{report.world_size} ranks, {report.dtype}: {', '.join(ran) or 'nothing ran'}"
    if worst is not None:
        text += f", worst {worst:.3g} eps"
    if left:
        text += f"; {', '.join(left)}"
    return f"{text}; {report.seconds:.0f} s."


def _matrix(report: SweepReport) -> Table:
    schedules = list(dict.fromkeys(cell.schedule for cell in report.cells))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("mesh")
    for schedule in schedules:
        table.add_column(schedule)
    meshes: dict[str, dict[str, CellResult]] = {}
    for cell in report.cells:
        label = " ".join(f"{a}={n}" for a, n in cell.mesh.items() if n > 1) or "one rank"
        meshes.setdefault(label, {})[cell.schedule] = cell
    for label, row in meshes.items():
        table.add_row(label, *(_cell(row.get(schedule)) for schedule in schedules))
    return table


def _cell(cell: CellResult | None) -> Text:
    if cell is None:
        return Text("")
    text = cell.verdict
    if cell.verdict == "aligned" and cell.worst_eps is not None:
        text = f"{cell.worst_eps:.3g} eps"
    return Text(text, _STYLES[cell.verdict])


def _is_told(cell: CellResult, verbose: bool) -> bool:
    return verbose or cell.verdict not in ("refused", "not run")
