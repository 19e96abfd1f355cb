"""Every exception paralign raises on purpose, and the exit status each one becomes.

    ParalignError
    |-- ConfigError (ValueError)      exit 2: the user's config or arguments are wrong
    |   |-- MeshError                 degrees, world size
    |   |-- ScheduleError             pipeline schedule, micro-batches, support table
    |   |-- LayoutError               a tensor's dims or sizes against an axis
    |   |-- DataError                 a batch or a data source
    |   `-- TraceError                a damaged, truncated or foreign trace
    |-- AlignError (AssertionError)   exit 1: a run is not the same training run
    |-- TrainingError (RuntimeError)  exit 3: training cannot go on: its checkpoint, a gradient
    `-- RankError (RuntimeError)      exit 3: a rank raised, died or hung
        `-- RankTimeout

A message names the value, the rule it breaks, the axis and its size, and the fix. All problems of
one input are reported together: see :meth:`ConfigError.from_problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

E = TypeVar("E", bound="ConfigError")


class ParalignError(Exception):
    """Base of every exception that paralign raises on purpose.

    Attributes:
        exit_status: What the command line exits with.
        rank: The rank that raised it, or -1.
        cause_type: Name of the exception that the rank raised.
        traceback: The rank's own traceback, as text.
    """

    exit_status = 1
    rank: int = -1
    cause_type: str = ""
    traceback: str = ""


class ConfigError(ParalignError, ValueError):
    """The user's config or arguments break a rule."""

    exit_status = 2

    @classmethod
    def from_problems(cls: type[E], title: str, problems: Sequence[str]) -> E:
        """Build one error that lists all ``problems`` as bullets under ``title``."""
        if len(problems) == 1:
            return cls(f"{title}: {problems[0]}")
        return cls(f"{title}:\n" + "\n".join(f"  - {problem}" for problem in problems))


class MeshError(ConfigError):
    """The degrees do not describe a mesh, or not one of this world."""


class ScheduleError(ConfigError):
    """The pipeline schedule cannot run exactly with these settings."""


class LayoutError(ConfigError):
    """A tensor's dims or sizes do not fit the axis it is split over."""


class DataError(ConfigError):
    """A batch or a data source does not fit the run."""


class TraceError(ConfigError):
    """A trace is damaged, truncated, mixed up or not a trace."""


class AlignError(ParalignError, AssertionError):
    """A run is not the same training run as its reference."""

    exit_status = 1


class TrainingError(ParalignError, RuntimeError):
    """Training cannot go on, for a reason that is neither the config's nor a rank's code."""

    exit_status = 3


class RankError(ParalignError, RuntimeError):
    """A rank raised or died; the message starts with its coordinates."""

    exit_status = 3


class RankTimeout(RankError):
    """A rank did not finish in time; the message says where each rank is stuck."""
