from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paralign.errors import ConfigError
from paralign.launch import run_ranks, start_fork_server
from tests.launch import rank_functions as on_rank
from tests.launch.processes import still_running

ROOT = Path(__file__).parents[2]

# found_here is found by sys.path alone, which a fork server does not use for its own imports.
PRELOADED = """
import sys
sys.path[:0] = sys.argv[1:]
from paralign.launch import run_ranks, start_fork_server
from tests.launch.rank_functions import imported_before_fork
if __name__ == "__main__":
    start_fork_server("found_here")
    names = ["torch.distributed.fsdp", "paralign.launch.preload", "found_here", "wave"]
    print(run_ranks(imported_before_fork, 1, names))
"""


@pytest.mark.ranks
def test_the_fork_server_has_imported_what_ranks_need(tmp_path):
    (tmp_path / "found_here.py").write_text("")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED, str(ROOT / "src"), str(ROOT), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[True, True, True, False]]\n"


BROKEN = """
from paralign.launch import run_ranks, start_fork_server
from tests.launch.rank_functions import plain_rank
if __name__ == "__main__":
    start_fork_server("broken_module")
    run_ranks(plain_rank, 2)
"""


@pytest.mark.ranks
def test_a_fork_server_that_ends_is_reported(tmp_path):
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('cannot be imported')\n")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", BROKEN],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert "RankError: the ranks cannot be started: their fork server ended" in done.stderr
    assert "RuntimeError: cannot be imported" in done.stderr


@pytest.mark.ranks
def test_a_fork_server_that_was_killed_is_started_again():
    run_ranks(on_rank.plain_rank, 1)
    (server,) = run_ranks(on_rank.parent_of_rank, 1)
    os.kill(server, signal.SIGKILL)
    assert still_running([server], seconds=5) == []
    assert run_ranks(on_rank.plain_rank, 2) == [0, 1]
    (server,) = run_ranks(on_rank.parent_of_rank, 1)
    os.kill(server, signal.SIGKILL)  # it has imported less than conftest's, which comes back
    assert still_running([server], seconds=5) == []


@pytest.mark.ranks
def test_the_second_world_pays_no_import():
    run_ranks(on_rank.plain_rank, 2)
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        run_ranks(on_rank.plain_rank, 2)
        seconds.append(time.monotonic() - started)
    # About 0.1 s on an idle machine; importing torch alone takes 1.4 s there.
    assert statistics.median(seconds) < 1.4


def test_modules_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError) as caught:
        start_fork_server("json", "no_such_module", "no_such_package.part")
    assert str(caught.value) == (
        "cannot preload modules for the ranks:\n"
        "  - module 'no_such_module' does not exist\n"
        "  - module 'no_such_package.part' does not exist"
    )


def test_starting_it_does_not_wait_and_leaves_the_import_path_alone(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    start_fork_server()
    assert "PYTHONPATH" not in os.environ
