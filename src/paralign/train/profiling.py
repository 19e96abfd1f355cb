"""Traces of some steps, as torch's profiler writes them: one file a rank, to look at in a browser.

``chrome://tracing`` and https://ui.perfetto.dev read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from paralign.config.training import ProfileSection
from paralign.errors import TrainingError

FOLDER = "profile"

Traced = Callable[[int], AbstractContextManager[None]]


@contextmanager
def traced_steps(
    section: ProfileSection, folder: Path, say: Callable[[str], None]
) -> Iterator[Traced]:
    """Give what to run each step in, with its number: those that are asked for are traced.

    A run that ends within them writes what there is; one that fails writes nothing.

    Args:
        section: Which steps, on which ranks.
        folder: The run's folder.
        say: Told where the trace is.

    Comm:
        none.

    Raises:
        TrainingError: The trace cannot be written.
    """
    tracer = _Tracer(section, folder, say)
    try:
        yield tracer.step
        tracer.write()
    finally:
        tracer.stop()


class _Tracer:
    def __init__(self, section: ProfileSection, folder: Path, say: Callable[[str], None]) -> None:
        self._first, self._say, self._folder = section.first_step, say, folder / FOLDER
        rank = dist.get_rank()
        if section.ranks is not None and rank not in section.ranks:
            self._first = None
        self._last = (self._first or 0) + section.steps - 1
        self._rank, self._reached = rank, 0
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number == self._first:
            self._profile = profile(activities=supported_activities())
            self._profile.start()
        if self._profile is None:
            yield
            return
        with record_function(f"step {number}"):
            yield
        self._reached = number
        if number == self._last:
            self.write()

    def write(self) -> None:
        """Write what was traced, if anything was and has not been written."""
        traced = self._profile
        if traced is None:
            return
        self.stop()
        name = f"rank-{self._rank:05d}-steps-{self._first}-{self._reached}.json"
        path, partial = self._folder / name, self._folder / f".partial-{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(partial))
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise TrainingError(
                f"{path} cannot be written: {error.strerror or error}. Make room there, or leave "
                "profile.first_step out; the run goes on from its last checkpoint."
            ) from None
        self._say(f"step {self._reached}: traced from step {self._first} on, {path}")

    def stop(self) -> None:
        """Trace no longer."""
        traced, self._profile = self._profile, None
        if traced is not None:
            traced.stop()
