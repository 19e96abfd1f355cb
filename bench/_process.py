"""Runs a command and says how long it took, by the clock and on the processors."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

_SET_CHILD_SUBREAPER = 36  # of Linux's prctl


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a command cost.

    Attributes:
        seconds: Until it ended.
        cpu_seconds: Processor time of all its processes, which hardly depends on what else the
            machine does. NaN where it cannot be known (not on Linux).
    """

    seconds: float
    cpu_seconds: float


def run(command: Sequence[str], *, limit: float) -> Cost:
    """Run ``command`` to its end. This process must have no other children.

    Args:
        command: Program and arguments.
        limit: Seconds after which it is killed.

    Raises:
        RuntimeError: It failed; what it wrote to stderr is in the message.
    """
    is_adopting = _adopt_orphans()
    before, began = _processor_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    if not is_adopting:
        return Cost(seconds=seconds, cpu_seconds=math.nan)
    _wait_for_orphans()
    return Cost(seconds=seconds, cpu_seconds=_processor_seconds() - before)


def _adopt_orphans() -> bool:
    """Become the parent of grandchildren whose parent ends, such as a fork server."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _wait_for_orphans() -> None:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
