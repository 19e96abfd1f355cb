"""What the ranks of these tests run: importable without pytest, which ranks need not import."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from paralign.errors import AlignError, ConfigError, LayoutError
from paralign.launch import report_event


class GuardError(LayoutError):
    """A subclass that lives outside ``paralign.errors``, with a constructor of its own."""

    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name}={value} is wrong")


class StubbornError(Exception):
    """Can be neither pickled nor unpickled."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.file = sys.stdout

    def __reduce__(self) -> NoReturn:
        raise TypeError("never")


def raise_unpicklable() -> NoReturn:
    raise TypeError("only unpickled on ranks")


class ExplodesWhenUnpickled:
    """Pickles well."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return raise_unpicklable, ()


def rank_and_sum(value: float) -> tuple[int, int, float, int]:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    total = torch.full((1,), value + rank, dtype=torch.float64)
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total.item(), torch.get_num_threads()


def plain_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def rank_facts(name: str) -> dict[str, Any]:
    import torch.distributed as dist

    return {
        "pid": os.getpid(),
        "variable": os.environ.get(name),
        "cwd": str(os.getcwd()),  # noqa: PTH109 (a string is what is compared)
        "backend": dist.get_backend(),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
        "torchrun": [key for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if key in os.environ],
    }


def tensor_of_rank() -> Any:
    import torch
    import torch.distributed as dist

    return {"t": torch.full((300_000,), float(dist.get_rank()), dtype=torch.float64)}


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def act_on(guilty: int, action: str) -> str:
    """Do ``action`` on one rank while all others wait for it in a collective."""
    import torch.distributed as dist

    barrier()
    if dist.get_rank() == guilty:
        act(action)
    barrier()
    return "done"


def act(action: str) -> None:
    actions: dict[str, Callable[[], object]] = {
        "raise": partial(raise_, ValueError("the model is on fire")),
        "stubborn": partial(raise_, StubbornError("cannot travel", 1)),
        "config": partial(raise_, ConfigError("heads=3 must divide")),
        "align": partial(raise_, AlignError("layer 2 is off")),
        "guard": partial(raise_, GuardError("head_dim", 3)),
        "sys.exit": partial(sys.exit, 3),
        "os._exit": partial(os._exit, 4),
        "os._exit(0)": partial(os._exit, 0),
        "kill": partial(os.kill, os.getpid(), signal.SIGKILL),
        "stop": partial(os.kill, os.getpid(), signal.SIGSTOP),
        "segfault": partial(ctypes.string_at, 0),
        "abort": os.abort,
        "hang": partial(time.sleep, 60),
        "hide": hide,
        "gather": gather,
    }
    actions[action]()


def gather() -> None:
    """Wait for every rank's number, which no other rank sends."""
    import torch
    import torch.distributed as dist

    dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.zeros(1))


def raise_(error: BaseException) -> NoReturn:
    raise error


def hide() -> NoReturn:
    """Close the sockets to the peers first, and speak a second later."""
    import torch.distributed as dist

    dist.destroy_process_group()
    time.sleep(1.0)
    raise ValueError("the guilty one speaks late")


def all_raise_config_error() -> None:
    raise ConfigError("layers=3 must be at least 4")


def two_raise() -> None:
    rank = plain_rank()
    if rank in (1, 2):
        raise KeyError(f"weight of {rank}")
    barrier()


def return_value(kind: str) -> Any:
    if plain_rank() != 1:
        return 0
    return (lambda: 0) if kind == "lambda" else ExplodesWhenUnpickled()


def report_progress(num_steps: int, seconds: float) -> int:
    for step in range(num_steps):
        time.sleep(seconds)
        report_event({"step": step})
    return num_steps


def start_helper_process(guilty: int) -> None:
    """Start a child on every rank; then one rank raises."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    report_event(child.pid)
    barrier()
    if plain_rank() == guilty:
        raise ValueError("leaves a child")
    barrier()


def report_pid_and_wait() -> None:
    report_event(os.getpid())
    barrier()
    if plain_rank() == 0:
        time.sleep(60)
    barrier()


def nested_world() -> None:
    from paralign.launch import run_ranks

    run_ranks(plain_rank, 1)


def hang_on(guilty: int) -> int:
    if plain_rank() == guilty:
        time.sleep(60)
    return guilty


def report_unpicklable() -> None:
    report_event(lambda: 0)


def report_explosive() -> None:
    report_event(ExplodesWhenUnpickled())


def imported_before_fork(names: list[str]) -> list[bool]:
    """Ask the fork server's own state: what this rank imports itself comes later."""
    return [name in sys.modules for name in names]


def parent_of_rank() -> int:
    return os.getppid()
