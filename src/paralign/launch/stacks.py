"""Where a rank is: read from what ``faulthandler`` wrote for it, without torch."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_LAUNCHER = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self._short_file}:{self.line} {self.function}"

    @property
    def _short_file(self) -> str:
        # The last two parts tell most files apart: 'llama/model.py', 'pangu_moe/model.py'.
        return "/".join(Path(self.file).parts[-2:])


def parse_main_thread(dump: str) -> list[Frame]:
    """Return the main thread's frames of the last stack in ``dump``, innermost first."""
    threads: list[list[Frame]] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (match := _FRAME.match(line)):
            frame = Frame(file=match["file"], line=int(match["line"]), function=match["function"])
            threads[-1].append(frame)
    # Only the main thread runs the launcher's rank.py with the user's function on top of it; of a
    # stack that is cut off before it, the main thread comes last.
    for frames in reversed(threads):
        if any(
            frame.file.startswith(_LAUNCHER) and frame.function == "rank_main" for frame in frames
        ):
            return frames
    return threads[-1] if threads else []


def describe_place(frames: list[Frame], *, num_callers: int = 3) -> str:
    """Say in one line where a stack is.

    Args:
        frames: Innermost first.
        num_callers: How many frames of the user's code to show.

    Returns:
        ``"in barrier (distributed/distributed_c10d.py:10), called from my/step.py:3 step"``, or
        without the first part where the innermost frame is the user's own.
    """
    hidden = tuple(str(folder) + os.sep for folder in _hidden_folders())
    shown = [f for f in frames if not f.file.startswith(("<", *hidden))]
    if not frames:
        return "at an unknown place"
    inner = frames[0]
    if not shown:
        return f"in {inner.function} ({str(inner).rpartition(' ')[0]})"
    callers = " < ".join(str(frame) for frame in shown[:num_callers])
    if shown[0] == inner:
        return f"at {callers}"
    return f"in {inner.function} ({str(inner).rpartition(' ')[0]}), called from {callers}"


def _hidden_folders() -> list[Path]:
    folders = [Path(__file__).parent, Path(os.__file__).parent / "multiprocessing"]
    torch = importlib.util.find_spec("torch")  # finds it, does not import it
    if torch is not None and torch.origin is not None:
        folders.append(Path(torch.origin).parent)
    return folders
