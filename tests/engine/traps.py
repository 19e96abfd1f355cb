"""The verdict on one trap: still there, mended by torch, or changed beyond what the docs say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paralign.errors import RankError
from paralign.testing import run_on_ranks

EXACT = 1e-12  # fp64: sums in another order stay below 1e-15, the traps are above 1e-4


def still_there(anchor: str, *, broken: bool, cured: bool, seen: object) -> None:
    """Pass while torch has the trap, fail when it has mended it.

    Args:
        anchor: The trap's section in docs/engine.md.
        broken: What torch does wrong was seen.
        cured: What the section recommends was right. If not, the section is wrong.
        seen: What was measured, for the message.
    """
    where = f"see docs/engine.md#{anchor}"
    if not cured:
        pytest.fail(f"the cure for {anchor} no longer works: {where} (measured: {seen})")
    if not broken:
        pytest.fail(f"torch has mended {anchor}: {where} (measured: {seen})")


def failure_of(fn: Callable[..., Any], world_size: int, *args: Any) -> str:
    """Return how a world of ranks ended, or an empty string if every rank returned."""
    try:
        run_on_ranks(fn, world_size, *args, timeout=10)
    except RankError as error:
        return str(error)
    return ""
