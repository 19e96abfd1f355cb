"""Say in words what became of router choices."""

from __future__ import annotations

from collections.abc import Iterator

from paralign.align.report.numbers import short
from paralign.align.verdict import RouterRow, Routing


def choices_line(routing: Routing) -> str:
    """Return one sentence about all routers."""
    if not routing.flipped:
        told = f"router choices: all {routing.choices:,} are the reference's"
        return f"{told}."
    share = routing.flipped / routing.choices
    told = f"router choices: {routing.flipped:,} of {routing.choices:,} ({share:.2%})"
    if routing.replayed:
        return (
            f"{told} would have been others; the reference's were replayed, in the truth as well."
        )
    return f"{told} are not the reference's."


def router_lines(routing: Routing, *, every: bool) -> Iterator[str]:
    """Yield a line for each router out of budget, or for ``every`` one."""
    for row in routing.routers if every else routing.failing:
        yield describe_router(row)


def describe_router(row: RouterRow) -> str:
    """Return what was counted and measured of one router."""
    text = (
        f"choices of {row.name} at step {row.step}: {row.flipped} of {row.choices} are not the "
        f"reference's (allowed {short(row.allowed)}), scores {short(row.eps)} eps"
    )
    if row.budget_eps is not None:
        text += f" (budget {short(row.budget_eps)})"
    return text + (f", ranks {', '.join(map(str, row.ranks_off))}" if row.ranks_off else "")
