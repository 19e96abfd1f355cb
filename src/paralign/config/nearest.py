"""Finds the name that a mistyped one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most like ``name``, ignoring case, or None when none is close."""
    by_lower = {item.lower(): item for item in known}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``"Did you mean X? "``-style help that ends in the names there are."""
    names = list(known)
    near = nearest(name, names)
    return f"Did you mean {near}?" if near else f"Use one of {', '.join(names)}."
