"""Hypothesis: a part never arrived, and zeros stand where it should be."""

from __future__ import annotations

import math

import torch

from paralign.align.explain.context import Context
from paralign.align.explain.proof import Proof, limit_of, parts_of, proves, worst_replicas
from paralign.align.judge import Compared

MISSING_CONTRIBUTION = "missing_contribution"


def prove_absent(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the tensor is None or zero everywhere, but not in the reference."""
    total = item.measured.total
    if not (total.size == 0.0 and total.base > 0.0):
        return None
    # Nothing is left to compare: what is there is zero, and filling it in is the reference.
    return Proof(
        MISSING_CONTRIBUTION,
        0.0,
        key=(MISSING_CONTRIBUTION, "absent"),
        detail={"zero_share": 1.0},
        text=f"{item.moment.kind} is None or zero everywhere in the parallel run, but not in the "
        "reference. Look for a detached output, a frozen parameter, or a stage whose backward did "
        "not run.",
    )


def prove_zeros(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the tensor is right wherever it is not zero."""
    limit = limit_of(item)
    if limit is None:
        return None
    norm = item.measured.total.base
    worst, zeros, elements = 0.0, 0, 0
    ranks: set[int] = set()
    for pieces in worst_replicas(item):
        error = 0.0
        for piece in pieces:
            lost = 0
            for box in parts_of(piece):
                x, r = piece.read(box), item.base.fetch(box)
                kept = x != 0
                error = math.hypot(error, float(torch.linalg.vector_norm((x - r)[kept])))
                if not error <= limit * norm:
                    return None
                lost += int(((~kept) & (r != 0)).sum())
                elements += x.numel()
            zeros += lost
            if lost:
                ranks.add(piece.rank)
        worst = max(worst, error / norm if norm else math.inf)
    if not zeros or zeros == elements or not proves(item, worst):
        return None
    off = sorted(ranks)
    everyone = sorted(item.measured.by_rank)
    whole_ranks = off != everyone
    axes = context.mesh.coordinates_that_tell(off, everyone) if whole_ranks else ()
    return Proof(
        MISSING_CONTRIBUTION,
        worst,
        tuple(context.mesh.named(axes)),
        key=(MISSING_CONTRIBUTION, "zeros", tuple(off) if whole_ranks else ()),
        detail={"zero_elements": zeros, "ranks": off, "zero_share": zeros / max(elements, 1)},
        text=f"It is right wherever it is not zero; {zeros} elements are zero that should not be"
        + (f", all on rank {', '.join(map(str, off))}" if whole_ranks else "")
        + ". Look for a bucket that was not reduced, a buffer received in part, or masked rows.",
    )
