"""The fork server: one process that has imported torch and forks every rank from then on.

``multiprocessing`` keeps it alive until this process ends, so the second world pays no import.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

from paralign.errors import ConfigError

PRELOAD = "paralign.launch.preload"


def start_fork_server(*modules: str) -> None:
    """Start the fork server and return at once, while it imports torch in the background.

    ``run_ranks`` calls this; a program calls it earlier to read its config in the meantime. Does
    nothing where a fork server already runs in this process: ``modules`` of a later call, or a fork
    server that other code started before, mean that ranks import those modules themselves.

    Args:
        modules: More modules that every rank needs, to be imported once as well. They must not
            start threads nor touch an accelerator.

    Raises:
        ConfigError: A module does not exist. (The fork server itself would ignore it silently.)
    """
    missing = [f"module {name!r} does not exist" for name in modules if not _exists(name)]
    if missing:
        raise ConfigError.from_problems("cannot preload modules for the ranks", missing)
    forkserver.set_forkserver_preload([PRELOAD, *modules])
    with _server_environment(), _interrupts_blocked():
        forkserver.ensure_running()


def fork_context() -> ForkServerContext:
    """Return the ``multiprocessing`` context whose processes come from the fork server."""
    return get_context("forkserver")


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    # The server inherits this. Ctrl-C goes to all processes of a terminal: the server would print a
    # traceback if it is still importing. This process hears it, and ends the ranks.
    resource_tracker.ensure_running()  # or the server would start it, which unblocks SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _server_environment() -> Iterator[None]:
    # A fork server gets this process's sys.path but does not use it for its own imports, so a
    # paralign found by sys.path alone would not be preloaded. preload.py asks for the last one.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    wanted = {"PYTHONPATH": path, "PARALIGN_FORK_SERVER": "1", **patient_threads()}
    saved = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def patient_threads() -> dict[str, str]:
    """Return the environment in which compute threads sleep while they have nothing to do.

    By default they spin: on a machine with more ranks than cores, a rank's waiting threads then
    take the time of those that work, and a run takes up to twenty times as long. Takes effect only
    where it is set before torch is imported; what the user has set stays.
    """
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep ``multiprocessing`` from importing this program's main module in every rank.

    A console script imports the whole command line, a test run all of pytest: seconds for eight
    ranks that need none of it. ``rank.py`` imports the main module where the job refers to it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
