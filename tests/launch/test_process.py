from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import is_running, still_running

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

# Prints the pids of its ranks, then waits for them: rank 0 hangs in Python, rank 1 in a collective.
# A shell that starts the tests in the background has them ignore SIGINT, hence the first lines.
PARENT = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from paralign.launch import run_ranks
from tests.launch.rank_functions import report_pid_and_wait
if __name__ == "__main__":
    def show(rank, pid):
        print(pid, flush=True)
    run_ranks(report_pid_and_wait, 2, timeout=None, on_event=show)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_do_not_outlive_their_parent(how, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "TMPDIR": str(tmp_path),
    }
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        family = pids + _children_of(parent.pid)
        assert len(family) >= 3  # the fork server too
        assert all(is_running(pid) for pid in family)
        os.kill(parent.pid, how)
        assert parent.wait(5) != 0
        assert still_running(family, seconds=5) == []
        stderr = parent.stderr.read()
    assert ("KeyboardInterrupt" in stderr) == (how is signal.SIGINT)
    # torch makes an empty cache folder while it is imported; what is ours must be gone.
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
