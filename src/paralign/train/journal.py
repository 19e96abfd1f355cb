"""All places that the lines of a run go to."""

from __future__ import annotations

from pathlib import Path

from paralign.config.run import RunConfig
from paralign.train.metrics import Metrics, MetricsFile, Validation
from paralign.train.trackers import Tracker, numbers_of, open_trackers


class Journal:
    """Writes lines on one rank, and nothing on others. Leave its block when the run ends.

    Args:
        config: The run.
        folder: Its folder.
        step: Steps that the run goes on from.
        is_writer: Whether this rank writes.

    Raises:
        ConfigError: See :func:`paralign.train.trackers.open_trackers`.
    """

    def __init__(self, config: RunConfig, folder: Path, *, step: int, is_writer: bool) -> None:
        self._file = MetricsFile(folder, step=step) if is_writer else None
        self._trackers: list[Tracker] = []
        if is_writer:
            self._trackers = open_trackers(config, folder, step=step)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close(is_failed=kind is not None)

    def write(self, line: Metrics | Validation) -> None:
        """Write a line.

        Raises:
            TrainingError: A disk is full, or a file cannot be written.
        """
        if self._file is not None:
            self._file.write(line)
        for tracker in self._trackers:
            tracker.write(numbers_of(line), line.step)
