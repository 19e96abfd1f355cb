"""A test's function as ranks run it: its comparisons are told to the process that runs the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paralign.testing.comparisons import FolderLog, listening


@dataclass(frozen=True, repr=False)
class RankCall:
    """Calls ``fn`` on a rank while ``log`` listens; sent there by pickle."""

    fn: Callable[..., Any]
    log: FolderLog

    def __repr__(self) -> str:
        # What messages about the job call it.
        return str(getattr(self.fn, "__qualname__", repr(self.fn)))

    def __call__(self, *args: Any) -> Any:
        """Call the function with the arguments of the test."""
        with listening(self.log):
            return self.fn(*args)
