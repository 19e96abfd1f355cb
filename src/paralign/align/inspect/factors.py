"""Whole-number factors between two numbers, and the axes whose size they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction

_LARGEST = 4096


def simple_factor(ratio: float, tolerance: float) -> Fraction | None:
    """Return the whole number other than 1, or one over it, that ``ratio`` is within rounding."""
    if not math.isfinite(ratio) or ratio <= 0:
        return None
    number = round(ratio) if ratio >= 1 else round(1 / ratio)
    if not 2 <= number <= _LARGEST:
        return None
    factor = Fraction(number) if ratio >= 1 else Fraction(1, number)
    return factor if abs(ratio / float(factor) - 1) <= tolerance else None


def explain_factor(factor: Fraction, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return every smallest set of axes whose sizes multiply to the factor, or one over it."""
    number = max(factor.numerator, factor.denominator)
    for length in (1, 2, 3):
        found = [
            chosen
            for chosen in itertools.combinations(sizes, length)
            if math.prod(sizes[axis] for axis in chosen) == number
        ]
        if found:
            return found
    return []
