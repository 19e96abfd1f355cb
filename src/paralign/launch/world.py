"""``run_ranks``: a function on every rank of a fresh world on this machine.

run_ranks --> fork server --> rank 0 ... rank n-1
    ^  one pipe and one exit sentinel per rank  |
    `-------------------------------------------'
"""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, TypeVar

from paralign.errors import ConfigError
from paralign.launch.channel import inside_rank
from paralign.launch.process import (
    RankProcess,
    end_ranks,
    forwarded,
    kill_ranks,
    start_ranks,
)
from paralign.launch.rank import MainModule, RankSetup
from paralign.launch.watchdog import Watchdog

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float | None = 60.0,
    describe: Callable[[int], str] | None = None,
    on_event: Callable[[int, Any], None] | None = None,
    forward: Sequence[signal.Signals] = (),
) -> list[T]:
    """Run ``fn(*args)`` on every rank of a fresh world on this machine.

    The default process group is ready when ``fn`` starts (gloo on cpu), and each rank computes
    with ``max(1, cores // world_size)`` threads. The world ends as a whole: when a rank raises,
    exits or is killed, all others are ended within 5 s. This process does not import torch for it.

    Args:
        fn: A function of a module's top level; it and ``args`` are sent by pickle.
        world_size: Number of ranks.
        args: The same arguments for every rank.
        device: ``"cpu"``, ``"cuda"``, ``"npu"`` or ``"xpu"``; rank ``i`` takes device ``i``.
        timeout: Seconds that the ranks, once all are up, may go on without finishing or calling
            :func:`report_event`. None: no limit.
        describe: A rank's coordinates in messages, such as ``Degrees(...).describe_rank``.
        forward: Signals that this process hands on to the ranks instead of dying of them, for a
            function that ends well when asked to. Only the main thread can.
        on_event: Called here with ``(rank, payload)`` for each ``report_event(payload)`` on a rank.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        RankError: A rank raised, exited or was killed. The message starts with its coordinates;
            ``.traceback`` has the rank's own traceback as text, ``.cause_type`` the name of the
            exception's class.
        RankTimeout: The ranks did not finish; the message says where each one is.
        ConfigError: The arguments are wrong, or a rank raised a ``ConfigError``: it is raised as
            the same class, with the coordinates in front.
        AlignError: A rank raised one, likewise.
    """
    _check_arguments(world_size, timeout)
    describe = describe or "rank {}".format
    job = _pickle_job(fn, args)
    with tempfile.TemporaryDirectory(prefix="paralign-", ignore_cleanup_errors=True) as name:
        setup = RankSetup(
            rank=0,
            world_size=world_size,
            device=device,
            folder=Path(name),
            parent_folder=Path(get_temp_dir()),
            timeout=timeout,
            environment=dict(os.environ),
            # The bytes may say so by accident, in a string; then the import is only superfluous.
            main=MainModule.of_this_program() if b"__main__" in job else None,
        )
        setup.job_file.write_bytes(job)
        ranks: list[RankProcess] = []
        try:
            start_ranks(setup, into=ranks)
            watchdog = Watchdog(ranks, timeout=timeout, describe=describe, on_event=on_event)
            with forwarded(forward, ranks):
                results: list[T] = watchdog.wait_for_results()
            end_ranks(ranks, describe=describe)
            return results
        finally:
            kill_ranks(ranks)


def _check_arguments(world_size: int, timeout: float | None) -> None:
    problems = []
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        problems.append(f"world_size={world_size!r} must be a whole number of at least 1")
    if timeout is not None and not timeout > 0:
        problems.append(f"timeout={timeout!r} must be more than 0 seconds, or None for no limit")
    if inside_rank():
        problems.append(
            "this process is itself a rank. If the call is at the top level of a script, put it "
            'under `if __name__ == "__main__":`, because ranks import the script'
        )
    if problems:
        raise ConfigError.from_problems("cannot start ranks", problems)


def _pickle_job(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__" and not MainModule.of_this_program():
        raise ConfigError(
            f"fn={name} is defined in an interactive session, where ranks cannot find it. "
            "Put it into a file and import it from there."
        )
    try:
        return pickle.dumps((fn, args), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ConfigError(
            f"fn={name} and its arguments cannot be sent to the ranks: pickling them failed with "
            f"{type(error).__name__}: {error}. Define fn at the top level of a module and pass "
            "plain values."
        ) from error
