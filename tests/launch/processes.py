"""Whether processes that tests know by number are gone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Tell whether the process runs; one that has ended but was not collected does not."""
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
    return "State:\tZ" not in status


def still_running(pids: Iterable[int], *, seconds: float) -> list[int]:
    """Return those processes that are still there after ``seconds``."""
    deadline = time.monotonic() + seconds
    left = list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if is_running(pid)]
    return left
