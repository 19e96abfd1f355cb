"""Joining a world that torchrun (or a cluster's launcher like it) has started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

from paralign.errors import ConfigError
from paralign.launch.failure import Failure, build_error

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


class World(NamedTuple):
    """This process's place in the world."""

    rank: int
    world_size: int


def current_world() -> World | None:
    """Return this process's place in the world that torchrun started, or None if it did not.

    Raises:
        ConfigError: Only a part of torchrun's environment is set, or it is not a world.
    """
    if "RANK" not in os.environ and "LOCAL_RANK" not in os.environ:
        return None
    _check_environment(os.environ)
    return World(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))


@contextmanager
def join_world(
    device: str = "cpu",
    *,
    timeout: float | None = None,
    describe: Callable[[int], str] | None = None,
) -> Iterator[World]:
    """Join the world that torchrun started, and leave it at the end.

    Inside, the default process group is ready, and the local rank has chosen the device.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"npu"`` or ``"xpu"``.
        timeout: Seconds that a collective may take. None: the engine's own limit.
        describe: A rank's coordinates in messages, such as ``Degrees(...).describe_rank``.

    Raises:
        ConfigError: There is no world to join, the device is not available, or the body raised one:
            the same class, with the coordinates of this rank in front.
        AlignError: The body raised one, likewise.
        RankError: The body raised anything else.
    """
    world = current_world()
    if world is None:
        raise ConfigError(
            "there is no world to join: RANK and LOCAL_RANK are not set. Start this program with "
            "torchrun, or use run_ranks to start ranks on this machine."
        )
    describe = describe or "rank {}".format
    try:
        _join(world, device, timeout)
        yield world
    except Exception as error:
        failure = Failure.of_exception(world.rank, error)
        raise build_error([failure], world.world_size, describe=describe) from error
    finally:
        _leave()


def _check_environment(environment: Mapping[str, str]) -> None:
    problems = [f"{name} is not set" for name in _VARIABLES if not environment.get(name)]
    problems += [
        f"{name}={environment[name]!r} must be a whole number"
        for name in _NUMBERS
        if environment.get(name) and not environment[name].isdecimal()
    ]
    if not problems and int(environment["RANK"]) >= int(environment["WORLD_SIZE"]):
        problems.append(
            f"RANK={environment['RANK']} must be less than WORLD_SIZE={environment['WORLD_SIZE']}"
        )
    if problems:
        fix = "Start with torchrun, which sets them all, or unset RANK and LOCAL_RANK."
        raise ConfigError.from_problems(
            f"the environment is not that of a torchrun rank. {fix} What is wrong", problems
        )


def _join(world: World, device: str, timeout: float | None) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from paralign.launch.device import backend_for, bind_device
    from paralign.vector_math import settle_vector_math

    settle_vector_math()
    backend = backend_for(device)
    local_rank = int(os.environ["LOCAL_RANK"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
    bind_device(device, local_rank=local_rank, local_world_size=local_world_size)
    limit = None if timeout is None else timedelta(seconds=timeout)
    options = {} if limit is None else {"timeout": limit}
    shared, rank, world_size = next(rendezvous("env://", world.rank, world.world_size, **options))
    # torch numbers its groups anew after a destroy, and a second world would find the addresses of
    # the first under its keys, and hang. Each world gets keys of its own instead.
    num_joins = shared.add(f"paralign/joins/{world.rank}", 1)
    store = PrefixStore(f"paralign/world/{num_joins}", shared)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
