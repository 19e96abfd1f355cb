"""Helpers for tests of parallel code, public and kept stable; each imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paralign.testing.aligned import assert_aligned as assert_aligned
    from paralign.testing.ranks import run_on_ranks as run_on_ranks

_HOME = {
    "assert_aligned": "paralign.testing.aligned",
    "run_on_ranks": "paralign.testing.ranks",
}

__all__ = ["assert_aligned", "run_on_ranks"]


def __getattr__(name: str) -> Any:
    # Lazy, because pytest imports this package with the plugin, in suites that never use it.
    if name not in _HOME:
        raise AttributeError(f"module 'paralign.testing' has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_HOME[name]), name))
