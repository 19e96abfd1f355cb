"""What the numbers cannot tell apart: factors that several sizes could give, and their names.

A candidate is one line that people and programs read:
``COMPONENT/CAUSE over AXIS x AXIS: MEANING``. A cause that sits on no axis has no ``over``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import NamedTuple

from paralign.align.explain.context import NUM_MICROBATCHES
from paralign.align.verdict import Finding

_LARGEST_FACTOR = 64
_CANDIDATE = re.compile(
    r"(?P<component>[a-z]+)/(?P<cause>[a-z_]+)(?: over (?P<axes>\w+(?: x \w+)*))?(?:: .*)?"
)


class Candidate(NamedTuple):
    """One of several explanations of the same numbers."""

    component: str
    cause: str
    axes: tuple[str, ...] = ()
    meaning: str = ""

    def __str__(self) -> str:
        over = f" over {' x '.join(self.axes)}" if self.axes else ""
        meaning = f": {self.meaning}" if self.meaning else ""
        return f"{self.component}/{self.cause}{over}{meaning}"


def read_candidate(text: str) -> Candidate:
    """Return the candidate that a line of a report names.

    Raises:
        ValueError: The text is no candidate.
    """
    match = _CANDIDATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a candidate: COMPONENT/CAUSE over AXIS x AXIS: MEANING")
    axes = match["axes"]
    return Candidate(match["component"], match["cause"], tuple(axes.split(" x ")) if axes else ())


def meanings(finding: Finding) -> list[Candidate]:
    """Return everything that a finding may mean.

    That is what it names, and its candidates where it also says which run would decide.
    """
    named = [Candidate(finding.component, finding.cause, tuple(finding.axes))]
    if finding.separate_by is None:
        return named
    return named + [read_candidate(text) for text in finding.candidates]


def names_place(finding: Finding, component: str, axes: Iterable[str]) -> bool:
    """Whether a finding names this component and exactly these axes, perhaps as a candidate."""
    wanted = component, frozenset(axes)
    return any((m.component, frozenset(m.axes)) == wanted for m in meanings(finding))


def names_cause(finding: Finding, component: str, axes: Iterable[str], cause: str) -> bool:
    """Whether a finding names this cause at this place, perhaps as a candidate."""
    wanted = component, frozenset(axes), cause
    return any((m.component, frozenset(m.axes), m.cause) == wanted for m in meanings(finding))


def simple_factor(scale: float) -> Fraction | None:
    """Return the whole number, or one over it, that ``scale`` is; None if it is neither."""
    if not math.isfinite(scale) or scale == 0.0:
        return None
    size = abs(scale)
    number = round(size) if size >= 1 else round(1 / size)
    if not 1 <= number <= _LARGEST_FACTOR:
        return None
    factor = Fraction(number) if size >= 1 else Fraction(1, number)
    # Only which number is meant is decided here; whether it is exact, the corrected tensor shows.
    if abs(size / float(factor) - 1) > 1e-2:
        return None
    return factor if scale > 0 else -factor


def fraction_factor(scale: float, tolerance: float) -> Fraction | None:
    """Return the fraction of two small numbers that ``scale`` is to within ``tolerance``.

    None also where the tolerance is so loose that some fraction always fits.
    """
    if not math.isfinite(scale) or scale == 0.0 or tolerance * _LARGEST_FACTOR**2 > 0.1:
        return None
    size = abs(scale)
    below = Fraction(size).limit_denominator(_LARGEST_FACTOR)
    if not 0 < below.numerator <= _LARGEST_FACTOR:
        return None
    if not abs(size / float(below) - 1) <= tolerance:
        return None
    return below if scale > 0 else -below


def sources_of(factor: Fraction, sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return every axis, or pair of axes, whose size is the factor or one over it."""
    number = abs(factor.numerator * factor.denominator)
    if factor.numerator != 1 and factor.denominator != 1 and abs(factor.numerator) != 1:
        return []
    known = {name: size for name, size in sizes.items() if size > 1}
    single: list[tuple[str, ...]] = [(name,) for name, size in known.items() if size == number]
    double = [(a, b) for a, b in combinations(known, 2) if known[a] * known[b] == number]
    return single + double


def axes_in(source: Sequence[str]) -> tuple[str, ...]:
    """Return the part of a source that lies on the mesh."""
    return tuple(axis for axis in source if axis != NUM_MICROBATCHES)


def told_sizes(sources: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> str:
    """Write sources with their sizes: ``dp=2 or cp=2``."""
    return " or ".join(" x ".join(f"{name}={sizes[name]}" for name in source) for source in sources)


def separate_sizes(sources: Sequence[Sequence[str]]) -> str | None:
    """Name the run that tells several sources of one factor apart; None for fewer than two."""
    if len(sources) < 2:
        return None
    names = sorted({name for source in sources for name in source})
    return (
        f"run again with only one of {', '.join(names)} changed to a size that no other has: the "
        "factor follows the guilty one"
    )
