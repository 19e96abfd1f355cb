"""Python's garbage, collected on all ranks at once."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def garbage_by_hand(every: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage every so many steps, on all ranks at once, instead of when Python likes.

    A collection stops a rank for some milliseconds, and all others that wait for it.
    """
    was_enabled = gc.isenabled()
    if every:
        gc.disable()

    def collect(step: int) -> None:
        if every and step % every == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if was_enabled:
            gc.enable()
