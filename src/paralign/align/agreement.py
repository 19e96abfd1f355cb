"""What the ranks tell each other before they record: the trace's id, and how much each one holds.

Only numbers and names are exchanged, once. Trouble of one rank becomes the trouble of all, so that
nobody waits for a trace that never begins.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paralign.align.trace_writer import prepare_folder
from paralign.errors import TraceError


def exchange(world_size: int, mine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what every rank gave, by rank.

    Comm:
        One all-gather of a small object over the default process group.
    """
    if world_size == 1:
        return [mine]
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, dict(mine))
    return found


def begin_folder(directory: Path, rank: int, world_size: int) -> str:
    """Clear the trace folder and return the id that all ranks give the trace.

    Comm:
        Two all-gathers of a small object over the default process group.

    Raises:
        TraceError: The folder cannot be used, on any rank.
    """
    said = {"id": secrets.randbits(62), "trouble": _prepare(directory, rank) if rank == 0 else ""}
    first = exchange(world_size, said)[0]
    _raise_any([first["trouble"]])
    # The others clear their own files once rank 0 has cleared all: where folders are not shared.
    trouble = _prepare(directory, rank) if rank else ""
    _raise_any([item["trouble"] for item in exchange(world_size, {"trouble": trouble})])
    return f"{first['id']:016x}"


def check_disk(directory: Path, need_bytes: int, world_size: int) -> int:
    """Return how many bytes all ranks of this machine need, and see that there is room for them.

    Comm:
        One all-gather of a small object over the default process group.

    Raises:
        TraceError: The disk has not enough room, on any rank.
    """
    host = socket.gethostname()
    everyone = exchange(world_size, {"host": host, "bytes": need_bytes})
    need: int = sum(item["bytes"] for item in everyone if item["host"] == host)
    free = shutil.disk_usage(directory).free
    trouble = ""
    if need > free:
        trouble = (
            f"{directory}: this recording needs {say_bytes(need)} on {host}, but only "
            f"{say_bytes(free)} are free. Record fewer steps, or less (what=), or elsewhere."
        )
    _raise_any([item["trouble"] for item in exchange(world_size, {"trouble": trouble})])
    return need


def say_bytes(number: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def _prepare(directory: Path, rank: int) -> str:
    try:
        prepare_folder(directory, rank=rank, clear_all=rank == 0)
    except (TraceError, OSError) as error:
        return str(error)
    return ""


def _raise_any(troubles: Sequence[str]) -> None:
    said = [trouble for trouble in troubles if trouble]
    if said:
        raise TraceError(said[0])
