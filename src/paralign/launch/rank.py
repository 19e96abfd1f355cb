"""The rank's side of a local world: what happens between the fork and the user's function."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import runpy
import shutil
import signal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from paralign.errors import RankError
from paralign.launch.channel import CHANNEL, Channel, Message
from paralign.launch.failure import Failure

STACK_SIGNAL = signal.SIGUSR1

# Set by torchrun for *its* ranks; a local world started below one must not join it twice.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class MainModule:
    """Where the program's main module is.

    Its functions and classes are pickled as ``__main__.name``, which ranks have to find.
    """

    name: str | None  # python -m name
    path: str | None  # python path

    @classmethod
    def of_this_program(cls) -> MainModule | None:
        """Return None in an interactive session."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        path = getattr(main, "__file__", None)
        if spec is None and path is None:
            return None
        return cls(
            name=None if spec is None else spec.name,
            path=None if path is None else str(Path(path).absolute()),
        )

    def import_here(self) -> None:
        """Make it the main module of this process; ``if __name__ == "__main__":`` does not run."""
        module = types.ModuleType("__mp_main__")
        # In place before it runs, so that what it pickles or looks up by name finds it.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
        if self.name is not None:
            content = runpy.run_module(self.name, run_name="__mp_main__")
        else:
            content = runpy.run_path(str(self.path), run_name="__mp_main__")
        module.__dict__.update(content)


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """All that a rank is told, apart from its job."""

    rank: int
    world_size: int
    device: str
    folder: Path  # private to the world, removed with it
    parent_folder: Path  # multiprocessing's own; holds the fork server's socket
    timeout: float | None
    environment: dict[str, str] = field(repr=False)  # may hold secrets
    main: MainModule | None  # where the job refers to it

    @property
    def job_file(self) -> Path:
        """Where the parent put the function and its arguments, pickled."""
        return self.folder / "job"

    @property
    def stack_file(self) -> Path:
        """Where this rank's stacks go."""
        return self.folder / f"stack-{self.rank}"


def rank_main(setup: RankSetup, connection: Connection) -> None:
    """Run the job on this rank and report how it went. Target of the rank's process."""
    # A group of its own lets the parent end the rank together with whatever the rank started.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _watch_parent(leftovers=(setup.folder, setup.parent_folder))
    _replace_environment(setup.environment)
    channel = Channel(connection)
    CHANNEL.set(channel)
    with _stacks_written_to(setup.stack_file):
        try:
            result = _run_job(setup, channel)
            content = _pickle_result(result)
        except BaseException as error:
            channel.send(Message.FAILURE, Failure.of_exception(setup.rank, error))
        else:
            channel.send(Message.RESULT, content)
        sys.stdout.flush()
        sys.stderr.flush()
        # Only when all ranks are done may one of them close its connections: a peer that still
        # reads would take that for a failure.
        channel.wait_for_end()
        _leave_process_group()


@contextmanager
def _stacks_written_to(path: Path) -> Iterator[None]:
    # Stacks of fatal signals, and of a rank that is asked where it is.
    with path.open("w", encoding="utf-8") as file:
        faulthandler.enable(file=file)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)
            faulthandler.disable()


def _run_job(setup: RankSetup, channel: Channel) -> Any:
    if setup.main is not None:
        setup.main.import_here()
    function, args = pickle.loads(setup.job_file.read_bytes())
    _join_process_group(setup)
    channel.send(Message.READY)
    return function(*args)


def _join_process_group(setup: RankSetup) -> None:
    import torch
    import torch.distributed as dist

    from paralign.launch.device import backend_for, bind_device
    from paralign.vector_math import settle_vector_math

    settle_vector_math()
    torch.set_num_threads(max(1, num_cores() // setup.world_size))
    backend = backend_for(setup.device)
    bind_device(setup.device, local_rank=setup.rank, local_world_size=setup.world_size)
    # Longer than the parent waits, so that a hang is reported with stacks, not by the engine.
    limit = timedelta(seconds=1800 + 2 * (setup.timeout or 0))
    dist.init_process_group(
        backend,
        init_method=f"file://{setup.folder / 'rendezvous'}",
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=limit,
    )


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pickle_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise RankError(
            f"returned a {type(result).__name__} that cannot be pickled "
            f"({type(error).__name__}: {error}). Return plain tensors, numbers, strings or "
            "containers of them."
        ) from error


def _replace_environment(environment: dict[str, str]) -> None:
    # The fork server's environment is from the time of its start.
    os.environ.clear()
    os.environ.update(environment)
    for name in _TORCHRUN_VARIABLES:
        os.environ.pop(name, None)
    # All ranks are on this machine: no other may connect, and no host name has to resolve.
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "lo")


def _watch_parent(*, leftovers: tuple[Path, ...]) -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("rank_main runs in processes that multiprocessing started")
    sentinel = parent.sentinel

    def end_with_parent() -> None:
        wait([sentinel])
        # The parent was killed, so its temporary folders are left to the ranks.
        for folder in leftovers:
            shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, name="paralign-parent-watch", daemon=True).start()
