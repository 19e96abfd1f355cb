"""How a rank failed, which of several failures is the cause, and the exception it becomes.

Exceptions cross the process border as text and the name of a class of ``paralign.errors``. An
exception of the user's may be impossible to pickle or to unpickle; its message must arrive anyway.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from paralign import errors
from paralign.errors import (
    AlignError,
    ConfigError,
    ParalignError,
    RankError,
    RankTimeout,
    TrainingError,
)

E = TypeVar("E", bound=ParalignError)

# Errors of a rank that arrive as their own class: they say themselves what to do.
TOLD = (ConfigError, AlignError, TrainingError)

# What gloo, NCCL and sockets say on a rank whose peer is gone.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (is )?closed"
    r"|closed by peer|remote process exited|remote side|unable to (recv|send)"
    r"|failed to (recv|send)|transport endpoint|connection timed out|ncclRemoteError",
    re.IGNORECASE,
)


class Blame(IntEnum):
    """How likely a failure is the cause of the others; smaller is likelier."""

    OWN = 0  # an exception of the rank's own, an exit, a signal from outside
    ABORT = 1  # SIGABRT: the engine gave up, often because of a peer
    PEER = 2  # the connection to another rank is gone


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's end, as text."""

    rank: int
    text: str  # one line or paragraph, without coordinates
    cause_type: str  # "ValueError", "SIGKILL", "exit"
    blame: Blame
    traceback: str = ""
    error_class: str = "RankError"  # a name in paralign.errors

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Failure:
        """Describe an exception that the rank's function raised."""
        known = _known_class(error)
        cause_type = type(error).__name__
        if isinstance(error, SystemExit):
            text, cause_type = (
                f"called sys.exit({error.code!r}) before it returned a result",
                "exit",
            )
        elif issubclass(known, (*TOLD, RankError)):
            text = _text_of(error)
        else:
            text = _headline(error)
        network = isinstance(error, (RuntimeError, OSError)) and _PEER_GONE.search(text)
        return cls(
            rank=rank,
            text=text,
            cause_type=cause_type,
            blame=Blame.PEER if network else Blame.OWN,
            traceback="".join(traceback.format_exception(type(error), error, error.__traceback__)),
            error_class=known.__name__,
        )

    @classmethod
    def of_exit(cls, rank: int, status: int, *, place: str = "", stack: str = "") -> Failure:
        """Describe a process that ended without a word; a negative ``status`` is a signal."""
        where = f" {place}" if place else ""
        if status >= 0:
            text = f"exited with status {status} before it returned a result{where}"
            return cls(rank=rank, text=text, cause_type="exit", blame=Blame.OWN, traceback=stack)
        name = _signal_name(-status)
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        return cls(
            rank=rank,
            text=f"was ended by {name}{where}{hint}",
            cause_type=name,
            blame=Blame.ABORT if name == "SIGABRT" else Blame.OWN,
            traceback=stack,
        )

    @classmethod
    def of_misuse(cls, rank: int, text: str, error: Exception | None = None) -> Failure:
        """Describe what the parent found wrong with a rank, with the parent's own ``error``."""
        shown = [] if error is None else traceback.format_exception(error)
        return cls(
            rank=rank,
            text=text,
            cause_type="" if error is None else type(error).__name__,
            blame=Blame.OWN,
            traceback="".join(shown),
        )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's own __str__ may raise anything; the failure must still be told
        return _headline(error)


def _headline(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _known_class(error: BaseException) -> type[ParalignError]:
    for cls in type(error).__mro__:
        if cls.__module__ == errors.__name__ and issubclass(cls, TOLD):
            return cls
    # An error that already is about ranks needs no "RankError:" in front of its text.
    return RankError if isinstance(error, RankError) else ParalignError


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankTraceback(Exception):
    """The traceback that a rank printed, as the cause of the error raised in the parent."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


def build_error(
    failures: Sequence[Failure], world_size: int, *, describe: Callable[[int], str]
) -> ParalignError:
    """Turn the failures of a world, in order of arrival, into the one exception to raise.

    Args:
        failures: At least one.
        world_size: Number of ranks of the world.
        describe: Coordinates of a rank, for the message.

    Returns:
        A subclass of one of ``TOLD`` where the cause was one, else a ``RankError``.
        It has ``.rank``, ``.cause_type`` and ``.traceback``, the rank's own traceback as text.
    """
    likeliest = min(failures, key=lambda failure: failure.blame)  # the earliest of equals
    same = sorted(f.rank for f in failures if f.text == likeliest.text)
    cause = next(f for f in failures if f.rank == same[0])
    message = f"[{describe(cause.rank)}] {cause.text}"
    if len(same) > 1:
        ranks = f"all {world_size} ranks"
        if len(same) < world_size:
            ranks = "ranks " + ", ".join(map(str, same))
        message += f"\n(the same on {ranks})"
    for other in failures:
        if other.text != cause.text and other.blame is Blame.OWN:
            message += f"\nalso [{describe(other.rank)}] {other.text}"
    cls: type[ParalignError] = getattr(errors, cause.error_class)
    if not issubclass(cls, TOLD):
        cls = RankError
    return _with_details(cls(message), cause.rank, cause.cause_type, cause.traceback)


def build_timeout(
    title: str, places: Sequence[str], *, rank: int, describe: Callable[[int], str], stacks: str
) -> RankTimeout:
    """Build the exception that says where each rank is.

    Args:
        title: What did not happen in time.
        places: Where each rank is, by rank.
        rank: The first rank that is stuck.
        describe: Coordinates of a rank, for the message.
        stacks: The full stacks, as text.
    """
    lines = [f"  [{describe(rank)}] {place}" for rank, place in enumerate(places)]
    error = RankTimeout("\n".join([f"{title}:", *lines]))
    return _with_details(error, rank, "timeout", stacks)


def _with_details(error: E, rank: int, cause_type: str, stack: str) -> E:
    error.__dict__.update(rank=rank, cause_type=cause_type, traceback=stack)
    if stack:
        error.__cause__ = RankTraceback(stack)  # Python shows it above the error's own traceback
    return error
