"""The ranks of a world as processes of this machine: started, told to end, killed."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

from paralign.errors import RankError
from paralign.launch.rank import STACK_SIGNAL, RankSetup, rank_main
from paralign.launch.server import fork_context, main_module_hidden, start_fork_server

# Ranks that have been told to end get this long before they are killed.
END_LIMIT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """One rank, seen from its parent."""

    setup: RankSetup
    process: BaseProcess
    connection: Connection

    @property
    def rank(self) -> int:
        """Its place in the world."""
        return self.setup.rank

    @property
    def sentinel(self) -> int:
        """What ``multiprocessing.connection.wait`` reports as ready when the process has ended."""
        return self.process.sentinel

    def has_ended(self) -> bool:
        """Tell whether the process is over."""
        return self.process.exitcode is not None

    def wait_for_status(self) -> int | None:
        """Return the exit status of a process that is ending, None if it does not end after all."""
        self.process.join(1.0)
        return self.process.exitcode

    def ask_for_stack(self) -> None:
        """Have the rank append its stack to its stack file."""
        if self.process.pid is not None and not self.has_ended():
            os.kill(self.process.pid, STACK_SIGNAL)

    def read_stack_file(self) -> str:
        """Return what ``faulthandler`` has written so far."""
        try:
            return self.setup.stack_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def kill(self) -> None:
        """Kill the rank and whatever it started."""
        if self.process.pid is None:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # Not yet in its own group, or gone. multiprocessing knows which.
            self.process.kill()


def start_ranks(world: RankSetup, *, into: list[RankProcess]) -> None:
    """Start the ranks of a world, appending each to ``into`` as soon as it exists.

    Args:
        world: The setup of any of its ranks.
        into: The caller's list, which then holds the ranks to end where starting one fails.

    Raises:
        RankError: The fork server is gone.
    """
    start_fork_server()
    context = fork_context()
    try:
        for rank in range(world.world_size):
            setup = replace(world, rank=rank)
            ours, theirs = context.Pipe(duplex=True)
            process = context.Process(
                target=rank_main, args=(setup, theirs), name=f"paralign-rank-{rank}"
            )
            with theirs, main_module_hidden():
                process.start()
            into.append(RankProcess(setup=setup, process=process, connection=ours))
    except (OSError, EOFError) as error:
        raise RankError(
            "the ranks cannot be started: their fork server ended, most likely while it imported "
            "torch. Run `python -c 'import paralign.launch.preload'` to see why."
        ) from error


@contextmanager
def forwarded(signals: Iterable[signal.Signals], ranks: Sequence[RankProcess]) -> Iterator[None]:
    """Hand ``signals`` that this process gets on to every rank."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.process.pid is not None and not rank.has_ended():
                os.kill(rank.process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end_ranks(ranks: Iterable[RankProcess], *, describe: Callable[[int], str]) -> None:
    """Let ranks that have reported a result leave their process group and end.

    Warns:
        RuntimeWarning: A rank did not end well. Its result is not affected.
    """
    ranks = list(ranks)
    deadline = time.monotonic() + END_LIMIT_S
    for rank in ranks:
        try:
            rank.connection.send_bytes(b"end")
        except OSError:
            continue  # it has ended already, which the exit status below tells
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        status = rank.process.exitcode
        if status != 0:
            how = "did not end" if status is None else f"ended with status {status}"
            warnings.warn(
                f"[{describe(rank.rank)}] {how} after it had returned its result",
                RuntimeWarning,
                stacklevel=3,
            )


def kill_ranks(ranks: Iterable[RankProcess]) -> None:
    """Leave no process behind, whatever state the ranks are in."""
    ranks = list(ranks)
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.process.join(END_LIMIT_S)
        rank.connection.close()
        if rank.process.exitcode is not None:
            rank.process.close()
