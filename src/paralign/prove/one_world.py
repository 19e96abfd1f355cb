"""Many runs in one world of ranks, and a fresh world after each run that ends it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paralign.errors import AlignError, ConfigError, ParalignError, RankError
from paralign.launch import run_ranks


@dataclass(frozen=True)
class RunDone:
    """Told by rank 0 when every rank has finished the run called ``name``."""

    name: str
    seconds: float = 0.0


def run_many(
    function: Callable[..., None],
    names: Sequence[str],
    world_size: int,
    *args: Any,
    device: str,
    timeout: float,
    describe: Callable[[int], str],
    on_done: Callable[[RunDone], bool],
    on_failed: Callable[[str, ParalignError], None],
) -> None:
    """Call ``function(names, *args)`` on every rank, again with the rest after each failure.

    Args:
        function: Does the runs in order, and reports :class:`RunDone` from rank 0 after each.
        names: The runs.
        world_size: Number of ranks.
        args: Further arguments of ``function``.
        device: As in :func:`paralign.launch.run_ranks`.
        timeout: As there.
        describe: As there.
        on_done: Told of each run that came to its end; False: the others are not wanted any more.
        on_failed: Told of each run that ended its world, and by which error.
    """
    left = list(names)
    while left:
        stop = _Stop()

        def heard(rank: int, event: Any, stop: _Stop = stop) -> None:
            if isinstance(event, RunDone):
                left.remove(event.name)
                if not on_done(event):
                    raise stop

        try:
            run_ranks(
                function,
                world_size,
                tuple(left),
                *args,
                device=device,
                timeout=timeout,
                describe=describe,
                on_event=heard,
            )
            return
        except _Stop:
            return
        except (RankError, ConfigError, AlignError) as error:
            if not left:
                raise
            on_failed(left.pop(0), error)


class _Stop(Exception):
    """Ends the world from inside the watch over it."""
