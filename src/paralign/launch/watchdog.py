"""Watches the ranks of a world until all have a result, or one reason why they never will.

A rank is *waiting* until it has sent its result (*done*), or has sent a failure or ended without
either (*failed*).

The first failure does not end the watch at once. When a rank is killed, the others may say
"connection closed" before the operating system tells about the killed one, so a failure that looks
like a consequence waits longer for its cause than one that looks like a cause.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from paralign.launch.channel import Message
from paralign.launch.failure import Blame, Failure, build_error, build_timeout
from paralign.launch.process import RankProcess
from paralign.launch.stacks import describe_place, parse_main_thread

# From a cause to the end of the watch: other ranks may say the same, which the message counts.
SETTLE_S = 0.3
# From a consequence to the end of the watch, unless its cause arrives.
PATIENCE_S = 2.5
# Until all ranks have their process group. Includes the first import of torch on a busy machine.
START_LIMIT_S = 300.0
# For the ranks to write their stacks when asked.
STACK_LIMIT_S = 2.0


class Watchdog:
    """One watch over the ranks of one world."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        *,
        timeout: float | None,
        describe: Callable[[int], str],
        on_event: Callable[[int, Any], None] | None,
    ) -> None:
        """Watch ``ranks``, which have been started; the arguments are those of ``run_ranks``."""
        self._ranks = ranks
        self._timeout = math.inf if timeout is None else timeout
        self._describe = describe
        self._on_event = on_event
        self._deadline = time.monotonic() + START_LIMIT_S
        self._ready: set[int] = set()
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, Failure] = {}  # in order of arrival

    def wait_for_results(self) -> list[Any]:
        """Return the results by rank.

        Raises:
            ParalignError: A rank failed, see :func:`build_error`, or the time is up.
        """
        while (waiting := self._waiting()) and time.monotonic() < self._deadline:
            self._receive(waiting)
        if waiting and not self._failures:
            raise self._timeout_error(waiting)
        results = [] if self._failures else [self._load_result(rank) for rank in self._ranks]
        if self._failures:  # also one that appeared while results were loaded
            raise build_error(
                list(self._failures.values()), len(self._ranks), describe=self._describe
            )
        return results

    def _waiting(self) -> list[RankProcess]:
        over = self._results.keys() | self._failures.keys()
        return [rank for rank in self._ranks if rank.rank not in over]

    def _receive(self, waiting: Sequence[RankProcess]) -> None:
        owners: dict[Any, RankProcess] = {rank.connection: rank for rank in waiting}
        owners |= {rank.sentinel: rank for rank in waiting}
        left = max(0.0, self._deadline - time.monotonic())
        ready = wait(list(owners), timeout=None if math.isinf(left) else left)
        for rank in {owners[handle].rank: owners[handle] for handle in ready}.values():
            self._read(rank)

    def _read(self, rank: RankProcess) -> None:
        # Asked before the pipe is looked at: nothing is written to it after the end.
        ended = rank.has_ended()
        try:
            if rank.connection.poll():
                # One at a time, so that a rank that talks much does not drown out the others.
                self._handle(rank, rank.connection.recv_bytes())
                return
        except (EOFError, OSError):
            ended = True
        if ended:
            self._fail(_failure_of_end(rank))

    def _handle(self, rank: RankProcess, content: bytes) -> None:
        try:
            message, value = pickle.loads(content)
        except Exception as error:
            text = f"reported an event that cannot be unpickled: {type(error).__name__}: {error}"
            self._fail(Failure.of_misuse(rank.rank, text, error))
            return
        if message is Message.FAILURE:
            self._fail(value)
        elif message is Message.RESULT:
            self._results[rank.rank] = value
        elif message is Message.READY:
            self._ready.add(rank.rank)
            self._restart_clock()
        else:
            self._restart_clock()
            if self._on_event is not None:
                self._on_event(rank.rank, value)

    def _restart_clock(self) -> None:
        # An event restarts it as well: a training run may take days, one step may not.
        if len(self._ready) == len(self._ranks) and not self._failures:
            self._deadline = time.monotonic() + self._timeout

    def _fail(self, failure: Failure) -> None:
        self._failures[failure.rank] = failure
        patience = SETTLE_S if failure.blame is Blame.OWN else PATIENCE_S
        self._deadline = min(self._deadline, time.monotonic() + patience)

    def _load_result(self, rank: RankProcess) -> Any:
        try:
            return pickle.loads(self._results[rank.rank])
        except Exception as error:
            text = (
                "returned a value that cannot be unpickled in the process that started the ranks: "
                f"{type(error).__name__}: {error}"
            )
            self._fail(Failure.of_misuse(rank.rank, text, error))
            return None

    def _timeout_error(self, waiting: Sequence[RankProcess]) -> Exception:
        up = [rank for rank in waiting if rank.setup.stack_file.exists()]
        _collect_stacks(up)
        places = {rank.rank: self._place_of(rank) for rank in waiting}
        if len(self._ready) < len(self._ranks):
            title = f"not all {len(self._ranks)} ranks were up after {START_LIMIT_S:g} s"
        else:
            title = (
                f"{len(waiting)} of {len(self._ranks)} ranks did not finish "
                f"within timeout={self._timeout:g} s"
            )
        return build_timeout(
            title,
            [places.get(rank.rank, "has returned its result") for rank in self._ranks],
            rank=waiting[0].rank,
            describe=self._describe,
            stacks="\n".join(f"rank {rank.rank}:\n{rank.read_stack_file()}" for rank in up),
        )

    def _place_of(self, rank: RankProcess) -> str:
        if not rank.setup.stack_file.exists():
            return "has not started"
        frames = parse_main_thread(rank.read_stack_file())
        if not frames:
            return "gives no stack: it is stopped, or stuck outside Python"
        return f"is {describe_place(frames)}"


def _failure_of_end(rank: RankProcess) -> Failure:
    status = rank.wait_for_status()
    if status is None:
        return Failure.of_misuse(rank.rank, "closed its connection to the process that started it")
    if status >= 0:
        return Failure.of_exit(rank.rank, status)
    stack = rank.read_stack_file()
    frames = parse_main_thread(stack)
    place = describe_place(frames) if frames else ""
    return Failure.of_exit(rank.rank, status, place=place, stack=stack)


def _collect_stacks(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.ask_for_stack()
    deadline = time.monotonic() + STACK_LIMIT_S
    sizes: list[int] = []
    # faulthandler writes piece by piece: wait until all have written and nothing more comes.
    while time.monotonic() < deadline:
        time.sleep(0.05)
        previous, sizes = sizes, [len(rank.read_stack_file()) for rank in ranks]
        if all(sizes) and sizes == previous:
            return
