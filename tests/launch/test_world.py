from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paralign.errors import ConfigError
from paralign.launch import run_ranks
from tests.launch import rank_functions as on_rank

ROOT = Path(__file__).parents[2]


@pytest.mark.ranks
def test_results_come_by_rank_from_a_working_process_group():
    num_threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert run_ranks(on_rank.rank_and_sum, 3, 0.5) == [(r, 3, 4.5, num_threads) for r in range(3)]


@pytest.mark.ranks
def test_one_rank_is_a_world_too():
    assert run_ranks(on_rank.rank_and_sum, 1, 2.0)[0][:3] == (0, 1, 2.0)


@pytest.mark.ranks
def test_large_tensors_come_back():
    results = run_ranks(on_rank.tensor_of_rank, 2)
    assert [result["t"].shape for result in results] == [(300_000,), (300_000,)]
    assert [result["t"].unique().tolist() for result in results] == [[0.0], [1.0]]


@pytest.mark.ranks
@pytest.mark.parametrize("action", ["nothing", "raise"])
def test_a_world_leaves_nothing_in_the_temporary_folder(action, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if action == "nothing":
        run_ranks(on_rank.plain_rank, 2)
    else:
        with pytest.raises(Exception, match="on fire"):
            run_ranks(on_rank.act_on, 2, 1, "raise")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_the_parent_needs_no_torch():
    script = (
        "import sys\n"
        "from paralign.launch import run_ranks\n"
        "from tests.launch.rank_functions import plain_rank\n"
        "if __name__ == '__main__':\n"
        "    print(run_ranks(plain_rank, 2), 'torch' in sys.modules)\n"
    )
    assert _run_python("-c", script).stdout == "[0, 1] False\n"


@pytest.mark.ranks
def test_functions_of_the_main_script_run_on_ranks(tmp_path):
    script = tmp_path / "my_script"  # as an installed command: no .py at the end
    script.write_text(
        "from paralign.launch import run_ranks\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "def double(point): return Point(2 * point.x)\n"
        "if __name__ == '__main__':\n"
        "    print([point.x for point in run_ranks(double, 2, Point(21))])\n"
    )
    assert _run_python(str(script)).stdout == "[42, 42]\n"


@pytest.mark.ranks
def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from paralign.launch import run_ranks\ndef fn(): return 1\nrun_ranks(fn, 2)\n"
    )
    stderr = _run_python(str(script), status=1).stderr
    assert (
        "paralign.errors.ConfigError: [rank 0] cannot start ranks: this process is itself a rank. "
        "If the call is at the top level of a script, put it under "
        '`if __name__ == "__main__":`, because ranks import the script' in stderr
    )


@pytest.mark.ranks
def test_ranks_do_not_start_worlds():
    with pytest.raises(ConfigError, match="this process is itself a rank"):
        run_ranks(on_rank.nested_world, 1)


def test_wrong_arguments_are_listed_together():
    with pytest.raises(ConfigError) as caught:
        run_ranks(on_rank.plain_rank, 0, timeout=float("nan"))
    assert str(caught.value) == (
        "cannot start ranks:\n"
        "  - world_size=0 must be a whole number of at least 1\n"
        "  - timeout=nan must be more than 0 seconds, or None for no limit"
    )


def test_a_function_that_cannot_be_sent_is_refused_before_ranks_start():
    with pytest.raises(ConfigError) as caught:
        run_ranks(lambda: 0, 2)
    assert str(caught.value).startswith("fn=test_a_function_that_cannot")
    assert str(caught.value).endswith(
        "Define fn at the top level of a module and pass plain values."
    )


def test_a_function_of_an_interactive_session_is_refused():
    script = "from paralign.launch import run_ranks\ndef fn(): return 1\nrun_ranks(fn, 1)\n"
    stderr = _run_python("-c", script, status=1).stderr
    assert "fn=fn is defined in an interactive session, where ranks cannot find it." in stderr


def _run_python(*command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == status, done.stderr
    return done
