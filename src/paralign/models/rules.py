"""Rules that the sizes of every model share, as sentences for the user. None needs torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

_MANY = 8  # names a sentence can hold

SMALLEST_SHARE = 2.0**-16
"""Of what a dropout can drop: it draws 16 bits a feature."""


def size_problems(config: Any, *, counts: Sequence[str], positive: Sequence[str]) -> list[str]:
    """Return a sentence for every field that is not a whole number >= 1, or a number above 0."""
    found = [
        f"{name}={value!r} must be a whole number of at least 1"
        for name in counts
        if not is_whole(value := getattr(config, name)) or value < 1
    ]
    found += [
        f"{name}={value!r} must be a number above 0"
        for name in positive
        if not is_number(value := getattr(config, name)) or not value > 0 or math.isinf(value)
    ]
    return found


def share_problem(name: str, value: float) -> list[str]:
    """Return a sentence when ``value`` is no share that can be dropped, else nothing."""
    if not is_number(value) or not 0 <= value < 1:
        return [f"{name}={value!r} must be a number of at least 0 and below 1"]
    if 0 < value < SMALLEST_SHARE:
        return [f"{name}={value!r} is below 2**-16, the smallest share. Use {name}=0"]
    return []


def split_problem(name: str, value: int, degree: int, axis: str) -> list[str]:
    """Return a sentence when ``value`` does not split evenly over ``axis``, else nothing."""
    remainder = value % degree
    if not remainder:
        return []
    legal = ", ".join(str(d) for d in range(1, value + 1) if value % d == 0)
    return [
        f"{name}={value} does not split evenly over axis '{axis}' ({degree} ranks, remainder "
        f"{remainder}). Use {axis} in {{{legal}}} or {name}={value - remainder + degree}."
    ]


def shared_heads_problem(num_kv_heads: int, tp: int) -> list[str]:
    """Return a sentence when key/value heads neither split over tp nor are shared evenly by it.

    Fewer of them than ranks are replicated, each beside its own query heads.
    """
    if num_kv_heads % tp == 0 or tp % num_kv_heads == 0:
        return []
    legal = [d for d in range(1, tp + 1) if num_kv_heads % d == 0 or d % num_kv_heads == 0]
    return [
        f"num_kv_heads={num_kv_heads} and axis 'tp' ({tp} ranks): one must be a multiple of the "
        f"other, so that every rank has the key/value heads of its query heads. Use tp in "
        f"{{{', '.join(map(str, legal))}}} or num_kv_heads={tp}."
    ]


def divide_problem(name: str, value: int, by: str, divisor: int) -> list[str]:
    """Return a sentence when ``value`` is not a multiple of another field, else nothing."""
    remainder = value % divisor
    if not remainder:
        return []
    return [
        f"{name}={value} must be a multiple of {by}={divisor} (remainder {remainder}). "
        f"Use {name}={value - remainder + divisor}."
    ]


def even_problem(name: str, value: int, fix: str) -> list[str]:
    """Return a sentence when rotary positions cannot turn ``value`` features in pairs."""
    if value % 2 == 0:
        return []
    return [
        f"{name}={value} must be even, since rotary positions turn pairs of features. Use {fix}."
    ]


def seq_len_problem(seq_len: int) -> list[str]:
    """Return a sentence when a sequence of ``seq_len`` tokens is too short, else nothing."""
    if is_whole(seq_len) and seq_len >= 2:
        return []
    return [
        f"seq_len={seq_len!r} must be a whole number of at least 2: a single token has no next "
        "token to predict. Use seq_len=2 or more."
    ]


def is_whole(value: object) -> bool:
    """Tell an int from a bool, which Python counts as an int."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Tell a number from a bool or text."""
    return is_whole(value) or isinstance(value, float)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean X?" when a known name is close, else the first few known names."""
    names = list(known)
    if near := get_close_matches(name, names, n=1, cutoff=0.7):
        return f"Did you mean {near[0]!r}?"
    more = f" and {len(names) - _MANY} more" if len(names) > _MANY else ""
    return f"Use one of {', '.join(names[:_MANY])}{more}."
