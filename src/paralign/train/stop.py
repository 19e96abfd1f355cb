"""Ending a run on request: a signal is noted, and all ranks agree after the same step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)
"""What a cluster sends before it takes the machine away."""


class StopRequest:
    """Whether this rank has been asked to stop."""

    def __init__(self) -> None:
        self._name: str | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal."""
        self._name = signal.Signals(number).name

    def agreed(self, device: torch.device) -> bool:
        """Return whether any rank has been asked; the same on every rank.

        Comm:
            one all-reduce of one number over the world.
        """
        asked = torch.tensor([self._name is not None], dtype=torch.int32, device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Note :data:`STOP_SIGNALS` instead of dying of them. Only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.note) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
