"""``run_on_ranks``: a test's function on every rank of a fresh world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from paralign.launch import run_ranks, start_fork_server

T = TypeVar("T")


def run_on_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = 60,
    describe: Callable[[int], str] | None = None,
) -> list[T]:
    """Run ``fn(*args)`` on every rank of a fresh world and return the results by rank.

    The process group is ready when ``fn`` starts. The first world of a test run waits until torch
    and ``parallelize`` have been imported, once; each further one is up in about 0.3 s. What ranks
    need beside these they import themselves, unless ``paralign.launch.start_fork_server`` was told
    before. ``fn`` is a function of a
    module's top level; arguments and results are sent by pickle.

    Args:
        fn: What every rank runs.
        world_size: Number of ranks.
        args: The same arguments for every rank.
        device: Device type of the ranks.
        timeout: Seconds until the test fails with a message that says where each rank is.
        describe: A rank's coordinates in messages, such as ``Degrees(...).describe_rank``.

    Raises:
        RankError: A rank raised, exited or was killed; the message starts with its coordinates.
        RankTimeout: The ranks did not finish in time.
        ConfigError: A rank raised one; the same class is raised.
        AlignError: Likewise.
    """
    start_fork_server("paralign.parallelize")
    return run_ranks(fn, world_size, *args, device=device, timeout=timeout, describe=describe)
