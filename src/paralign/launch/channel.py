"""The pipe between a rank and the process that started it, and the events that go through it."""

from __future__ import annotations

import pickle
import threading
from contextvars import ContextVar
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any


class Message(str, Enum):
    """What a rank tells its parent."""

    READY = "ready"  # the process group is up; the user's function starts
    EVENT = "event"  # any number of times
    RESULT = "result"  # last, or
    FAILURE = "failure"  # last


class Channel:
    """A rank's end of the pipe. Any thread may send."""

    def __init__(self, connection: Connection) -> None:
        """Send through ``connection``."""
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message, value: Any = None) -> None:
        """Send ``message``; ``value`` must be picklable."""
        content = pickle.dumps((message, value), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._connection.send_bytes(content)

    def wait_for_end(self) -> None:
        """Return when the parent ends the world (or is gone)."""
        try:
            self._connection.recv_bytes()
        except (EOFError, OSError):
            return


# Set once in a rank, by rank.py, and never anywhere else.
CHANNEL: ContextVar[Channel | None] = ContextVar("paralign_rank_channel", default=None)


def report_event(payload: Any) -> None:
    """Hand ``payload`` to the ``on_event`` of the ``run_ranks`` that started this rank.

    An event also restarts the clock of ``run_ranks(timeout=...)``. Where nobody listens (under
    torchrun, outside ranks, in another thread than the rank's own) this does nothing.

    Args:
        payload: Any picklable value; keep it small.
    """
    channel = CHANNEL.get()
    if channel is not None:
        channel.send(Message.EVENT, payload)


def inside_rank() -> bool:
    """Tell whether this process is a rank that ``run_ranks`` started."""
    return CHANNEL.get() is not None
