"""Hypothesis: a tensor passed through a narrower dtype than it should have.

A tensor whose every element a narrow dtype can represent, while the reference's are not, was
rounded to it. Where the values only carry the noise of a narrower dtype (computed in it, then
widened), the error is within the budget a run in that dtype would have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paralign.align.budget import EPS, UNCALIBRATED_EPS
from paralign.align.explain.context import Context
from paralign.align.explain.proof import Proof, parts_of, pieces_once
from paralign.align.judge import Compared

PRECISION = "precision"

_NARROW = ("float32", "float16", "bfloat16")
# Sums in a narrow dtype carry noise of about one eps; far below it the dtype is not to blame.
_LEAST_NOISE = 0.02


def prove_precision(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ``item`` was rounded to, or computed in, a narrower dtype."""
    before = item.measured.total.relative
    for dtype in _NARROW:
        eps = EPS[dtype]
        if eps <= context.budget.eps * 1.5:
            continue
        limit = UNCALIBRATED_EPS[dtype].value * eps
        if not before <= limit:
            continue
        rounded = _is_representable(item, dtype)
        # Noise of that size proves nothing once something earlier is known to be wrong.
        if rounded or (not context.upstream and _LEAST_NOISE * eps <= before):
            return _proof(dtype, before / eps, rounded)
    return None


def _is_representable(item: Compared, dtype: str) -> bool:
    """Whether every element fits ``dtype`` exactly, and the reference's do not."""
    target = getattr(torch, dtype)
    fits = all(
        _fits(piece.read(box), target) for piece in pieces_once(item) for box in parts_of(piece)
    )
    if not fits:
        return False
    return not all(
        _fits(item.base.fetch(box), target)
        for piece in pieces_once(item)
        for box in parts_of(piece)
    )


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).to(torch.float64), values)


def _proof(dtype: str, noise: float, rounded: bool) -> Proof:
    how = (
        f"every element is one that {dtype} can represent"
        if rounded
        else f"the error is within what a run in {dtype} would have"
    )
    # What is left is measured in the budget of the dtype itself: its own rounding is all there is.
    return Proof(
        PRECISION,
        0.0 if rounded else float("nan"),
        key=(PRECISION, dtype, rounded),
        detail={"dtype": dtype, "eps_of_dtype": noise, "representable": rounded},
        text=f"{how[0].upper()}{how[1:]}: look for a cast, autocast or a reduction and "
        f"accumulation in {dtype}.",
    )
