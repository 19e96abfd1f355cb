"""Numbers as people read them, the same on the terminal and on the page."""

from __future__ import annotations

import math


def short(value: float) -> str:
    """Return about the same width for all sizes: ``3.1``, ``100``, ``4.5e+15``, ``nan``."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 0.1 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"
    return f"{value:.1e}"


def finite(value: float) -> float:
    """Return what to sort by: a value that is no number is as bad as can be."""
    return value if math.isfinite(value) else math.inf


def expected_and_found(values: tuple[float, float]) -> str:
    """Return ``expected -> found`` with enough digits to tell the two apart, if nine are enough."""
    base, value = values
    digits = next((n for n in (4, 6) if f"{base:.{n}g}" != f"{value:.{n}g}"), 9)
    return f"{base:.{digits}g} -> {value:.{digits}g}"


def seconds(value: float) -> str:
    """Return a length of time: ``0.12 s``, ``12 s``, ``3 min 5 s``."""
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s"
