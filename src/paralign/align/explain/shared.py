"""Join findings that are one cause seen twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from paralign.align.verdict import Finding

_SCALED = ("constant_factor", "token_weighting")
_FACTORS = ("constant_factor", "double_reduction")


def one_factor(losses: Sequence[Finding], gradients: Sequence[Finding]) -> list[Finding] | None:
    """Return one finding where the loss and all gradients are off by the same factor.

    The loss is what is scaled then, and the gradients follow.
    """
    if len(losses) != 1 or len(gradients) != 1:
        return None
    loss, gradient = losses[0], gradients[0]
    same = _same(loss.evidence.get("factor"), gradient.evidence.get("factor"))
    if loss.cause not in _SCALED or gradient.cause not in _FACTORS or not same:
        return None
    loss.evidence["gradients"] = gradient.evidence.get("tensors")
    loss.fix += f" {gradient.evidence.get('tensors')} gradients have the same factor."
    return [loss]


def _same(one: object, other: object) -> bool:
    """Whether two factors, written as fractions or decimals, are one number."""
    if one is None or other is None:
        return one is other
    return math.isclose(float(Fraction(str(one))), float(Fraction(str(other))), rel_tol=1e-10)
