"""What a test's comparisons came to, told to whoever runs the test: the plugin, or a rank's caller.

``assert_aligned`` reports every comparison to the listener of the test in progress. On a rank the
listener writes it into a folder, from which the process that runs the test reads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """One comparison of a test."""

    mesh: dict[str, int]
    verdict: str
    findings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_aligned(self) -> bool:
        """Whether the runs were the same."""
        return self.verdict == "aligned"


Listener = Callable[[Comparison, Mapping[str, Path], str], "Path | None"]
"""Takes a comparison, its traces by role and its report as JSON; returns where it kept them."""

_LISTENER: ContextVar[Listener | None] = ContextVar("paralign_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of every comparison that is made inside of the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(comparison: Comparison, traces: Mapping[str, Path], report: str) -> Path | None:
    """Tell the listener, if there is one, and return where it kept the traces."""
    listener = _LISTENER.get()
    return None if listener is None else listener(comparison, traces, report)


class TestLog:
    """The listener of one test: remembers its comparisons and keeps the traces of failing ones.

    Args:
        keep: Folder to copy failing traces to; None keeps none.
    """

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, keep: Path | None) -> None:
        self.keep = keep
        self.comparisons: list[Comparison] = []

    def __call__(
        self, comparison: Comparison, traces: Mapping[str, Path], report: str
    ) -> Path | None:
        """Take in one comparison."""
        self.comparisons.append(comparison)
        return keep_traces(self.keep, comparison, traces, report)


@dataclass(frozen=True)
class FolderLog:
    """The listener on a rank: writes each comparison into a file of ``folder``."""

    folder: Path
    keep: Path | None

    def __call__(
        self, comparison: Comparison, traces: Mapping[str, Path], report: str
    ) -> Path | None:
        """Take in one comparison."""
        number = len(list(self.folder.glob("*.json")))
        content = json.dumps(asdict(comparison))
        (self.folder / f"{number:04d}.json").write_text(content, encoding="utf-8")
        return keep_traces(self.keep, comparison, traces, report)

    def read(self) -> list[Comparison]:
        """Return what the ranks wrote, in order."""
        paths: Sequence[Path] = sorted(self.folder.glob("*.json"))
        return [Comparison(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def keep_traces(
    keep: Path | None, comparison: Comparison, traces: Mapping[str, Path], report: str
) -> Path | None:
    """Copy the traces of a failing comparison into a new folder of ``keep``, with its report."""
    if keep is None or comparison.is_aligned:
        return None
    keep.mkdir(parents=True, exist_ok=True)
    number = len([path for path in keep.iterdir() if path.is_dir()])
    target = keep / str(number)
    for role, folder in traces.items():
        shutil.copytree(folder, target / role)
    target.mkdir(exist_ok=True)
    (target / "report.json").write_text(report, encoding="utf-8")
    return target
