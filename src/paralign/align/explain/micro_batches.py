"""Hypothesis: of one micro-batch a part was never computed.

Ranks may each hold a part of a micro-batch's gradient that the reference has in one piece: the two
ends of a tied parameter, say. Weights of contributions cannot tell what never became one. But where
all other micro-batches add up to the reference's, what one of them lacks is all that is off.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paralign.align.explain.context import Context
from paralign.align.explain.contributions import Contribution, adds, contributions_to
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.proof import (
    Held,
    Mix,
    Proof,
    Readable,
    left_in_all,
    limit_of,
    parts_of,
    pieces_once,
    proves,
)
from paralign.align.judge import Compared


def prove_lost_micro_batch(context: Context, item: Compared) -> Proof | None:
    """Return the proof that some ranks had nothing for a micro-batch that they should have had."""
    limit = limit_of(item)
    ours = _by_number(contributions_to(item, context.parallel))
    theirs = _by_number(contributions_to(item, context.reference))
    if limit is None or len(ours) < 2 or ours.keys() != theirs.keys():
        return None
    idle = {n: {c.label.rank for c in ours[n] if not adds(c)} for n in ours}
    always = set.intersection(*idle.values())
    lost = {n: sorted(ranks - always) for n, ranks in idle.items() if ranks - always}
    if not lost or len(lost) == len(ours):
        return None
    terms: list[tuple[float, Readable]] = [(1.0, item.base)]
    for number in lost:
        terms += [(-1.0, one) for one in theirs[number]]
        terms += [(1.0, one) for one in _distinct(ours[number], pieces_once(item))]
    left = left_in_all(item, Mix(tuple(terms)), item.measured.total.base)
    if not proves(item, left):
        return None
    told = ", ".join(map(str, lost))
    ranks = sorted({rank for those in lost.values() for rank in those})
    return Proof(
        MISSING_CONTRIBUTION,
        left,
        component="backward",
        key=(MISSING_CONTRIBUTION, "lost", tuple(lost)),
        detail={"micro_batches": list(lost), "ranks": ranks},
        text=f"Rank {', '.join(map(str, ranks))} had nothing to add in micro-batch {told}, and "
        "with what the reference has there it is right. Look for a forward without gradient, a "
        "detached weight, or a reduction that runs before the last micro-batch.",
    )


def _by_number(contributions: Sequence[Contribution]) -> dict[int, list[Contribution]]:
    found: dict[int, list[Contribution]] = {}
    for one in contributions:
        found.setdefault(one.label.micro_batch, []).append(one)
    return found


def _distinct(contributions: Sequence[Contribution], parts: Sequence[Held]) -> list[Contribution]:
    """Leave out what is the same as another's: ranks that compute the same count once."""
    kept: list[Contribution] = []
    for one in contributions:
        if not any(_are_equal(one, other, parts) for other in kept):
            kept.append(one)
    return kept


def _are_equal(one: Contribution, other: Contribution, parts: Sequence[Held]) -> bool:
    return all(
        torch.equal(one.fetch(box), other.fetch(box)) for part in parts for box in parts_of(part)
    )
