"""Say when only one rank is off, although others do the same work."""

from __future__ import annotations

from collections.abc import Sequence

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.proof import Proof, finding_of
from paralign.align.judge import Compared
from paralign.align.verdict import Finding

SINGLE_RANK = "single_rank"


def off_ranks(items: Sequence[Compared]) -> list[int]:
    """Return the ranks whose pieces are out of budget in any of ``items``."""
    return sorted({rank for item in items for rank in item.row.ranks_off})


def only_rank(context: Context, items: Sequence[Compared]) -> int | None:
    """Return the one rank that is off while another that holds parts of these is not."""
    ranks = off_ranks(items)
    others = any(
        part.elements and rank not in item.row.ranks_off
        for item in items
        for rank, part in item.measured.by_rank.items()
    )
    return ranks[0] if len(ranks) == 1 and others else None


def on_one_rank(context: Context, proven: Sequence[tuple[Compared, Proof]]) -> bool:
    """Whether what was proven concerns one rank only."""
    return only_rank(context, [item for item, _ in proven]) is not None


def single_finding(
    context: Context, proven: Sequence[tuple[Compared, Proof]], component: str
) -> Finding:
    """Report what one rank alone does, and how its numbers are off."""
    items = [item for item, _ in proven]
    rank = only_rank(context, items)
    how = proven[0][1].cause
    finding = finding_of(proven, component, f"Only what rank {rank} holds is off.")
    axes = tuple(finding.axes)
    finding.cause, finding.axes = SINGLE_RANK, []
    finding.evidence["rank"] = rank
    finding.evidence["how"] = how
    finding.candidates = [
        str(Candidate(finding.component, SINGLE_RANK, (), f"rank {rank} alone")),
        str(Candidate(finding.component, how, axes, f"by its place, seen on rank {rank} only")),
    ]
    finding.separate_by = (
        f"run again with the ranks in another order: a fault of rank {rank}'s machine or code path "
        "stays with it, a mistake in the layout moves"
    )
    return finding
