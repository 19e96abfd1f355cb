"""What to say where no hypothesis holds: which tensors, which ranks, where to look first."""

from __future__ import annotations

from collections.abc import Sequence

from paralign.align.explain.context import Context
from paralign.align.explain.proof import evidence
from paralign.align.explain.single import SINGLE_RANK, off_ranks, only_rank
from paralign.align.judge import Compared
from paralign.align.verdict import Finding

UNKNOWN = "unknown"


def unknown_finding(
    context: Context, items: Sequence[Compared], component: str, *, alone: bool = True
) -> Finding:
    """Describe tensors that nothing explains.

    Args:
        context: The comparison.
        items: They; not empty, of one kind.
        component: Where they are computed.
        alone: No other tensor of this kind and step was explained.
    """
    worst = max(items, key=lambda item: item.row.strain)
    ranks = off_ranks(items)
    rank = only_rank(context, items)
    if rank is not None:
        fix = (
            f"Only what rank {rank} holds is off; the other ranks' parts are in budget. Compare "
            f"what rank {rank} does alone: its code path, its device, its input."
        )
    else:
        rest = "" if alone else " They may follow from the causes above: mend those first."
        fix = (
            f"{len(items)} {worst.moment.kind} tensors are off in a way that no known mistake "
            f"gives; the worst is {worst.row.label}.{rest} Record the outputs of modules as well "
            "(what=(..., 'outputs', 'output_grads')): the first one that differs is where to look."
        )
    return Finding(
        component=component,
        cause=SINGLE_RANK if rank is not None else UNKNOWN,
        tensor=worst.row.label,
        evidence={
            **evidence(worst, None),
            "tensors": len(items),
            "ranks": ranks,
            **({} if rank is None else {"rank": rank}),
            "step": worst.row.step,
            "names": sorted({item.row.label for item in items})[:20],
        },
        fix=fix,
    )
