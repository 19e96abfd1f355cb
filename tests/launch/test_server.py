from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paralign.errors import ConfigError
from paralign.launch import run_ranks, start_fork_server
from tests.launch import rank_functions as on_rank

ROOT = Path(__file__).parents[2]

# paralign is found by sys.path alone, which a fork server does not use for its own imports.
PRELOADED = f"""
import sys
sys.path[:0] = [{str(ROOT / "src")!r}, {str(ROOT)!r}]
from paralign.launch import run_ranks, start_fork_server
from tests.launch.rank_functions import imported_before_fork
if __name__ == "__main__":
    start_fork_server("colorsys")
    names = ["torch.distributed.fsdp", "paralign.launch.preload", "colorsys", "wave"]
    print(run_ranks(imported_before_fork, 1, names))
"""


@pytest.mark.ranks
def test_the_fork_server_has_imported_what_ranks_need():
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PRELOADED],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[[True, True, True, False]]\n"


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
