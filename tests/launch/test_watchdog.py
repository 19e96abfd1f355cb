from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from paralign.errors import AlignError, ConfigError, LayoutError, RankError, RankTimeout
from paralign.launch import run_ranks
from paralign.mesh import Degrees
from tests.launch import rank_functions as on_rank
from tests.launch.processes import still_running

pytestmark = pytest.mark.ranks

describe = Degrees(pp=2, cp=2).describe_rank


def error_of(fn: Callable[..., object], world_size: int, *args: object, **kwargs: Any):
    """Return the error of a world and when it came; no process whose pid was reported is left."""
    pids: list[int] = []
    run_ranks(on_rank.plain_rank, 1)  # torch is imported by now, so that the clock is fair
    started = time.monotonic()
    with pytest.raises((RankError, ConfigError, AlignError)) as caught:
        run_ranks(fn, world_size, *args, on_event=lambda _, pid: pids.append(pid), **kwargs)
    assert still_running(pids, seconds=1) == []
    return caught.value, time.monotonic() - started


@pytest.mark.parametrize(
    ("action", "text", "cause_type"),
    [
        ("raise", "ValueError: the model is on fire", "ValueError"),
        ("stubborn", "tests.launch.rank_functions.StubbornError: cannot travel", "StubbornError"),
        ("sys.exit", "called sys.exit(3) before it returned a result", "exit"),
        ("os._exit", "exited with status 4 before it returned a result", "exit"),
        ("os._exit(0)", "exited with status 0 before it returned a result", "exit"),
        (
            "kill",
            "was ended by SIGKILL (the system may have run out of memory)",
            "SIGKILL",
        ),
        ("hide", "ValueError: the guilty one speaks late", "ValueError"),
    ],
)
def test_the_guilty_rank_is_named_and_ends_the_world(action, text, cause_type):
    error, seconds = error_of(on_rank.act_on, 4, 3, action, describe=describe)
    assert str(error) == f"[rank 3: pp=1 cp=1] {text}"
    assert type(error) is RankError
    assert (vars(error)["rank"], vars(error)["cause_type"]) == (3, cause_type)
    assert seconds < 5 + (action == "hide")


@pytest.mark.parametrize(("action", "name"), [("segfault", "SIGSEGV"), ("abort", "SIGABRT")])
def test_a_crash_says_where_it_was(action, name):
    error, seconds = error_of(on_rank.act_on, 2, 1, action)
    first, *_ = str(error).splitlines()
    assert first.startswith(f"[rank 1] was ended by {name} ")
    assert "launch/rank_functions.py:" in first
    assert first.endswith(" act") or " act < " in first
    assert "Fatal Python error" in vars(error)["traceback"]
    assert seconds < 5


def test_the_traceback_of_the_rank_comes_along():
    error, _ = error_of(on_rank.act_on, 2, 0, "raise")
    assert "in act_on\n" in vars(error)["traceback"]
    assert "rank_functions.py" in str(error.__cause__)


@pytest.mark.parametrize(
    ("action", "cls", "text"),
    [
        ("config", ConfigError, "heads=3 must divide"),
        ("align", AlignError, "layer 2 is off"),
        ("guard", LayoutError, "head_dim=3 is wrong"),  # the nearest class of paralign.errors
    ],
)
def test_config_and_align_errors_keep_their_class(action, cls, text):
    error, _ = error_of(on_rank.act_on, 2, 1, action, describe=Degrees(cp=2).describe_rank)
    assert type(error) is cls
    assert str(error) == f"[rank 1: cp=1] {text}"


def test_an_error_of_all_ranks_is_told_once():
    error, _ = error_of(on_rank.all_raise_config_error, 3)
    assert type(error) is ConfigError
    assert str(error) == "[rank 0] layers=3 must be at least 4\n(the same on all 3 ranks)"


def test_different_errors_of_two_ranks_are_both_told():
    error, _ = error_of(on_rank.two_raise, 3)
    assert sorted(str(error).replace("also ", "").splitlines()) == [
        "[rank 1] KeyError: 'weight of 1'",
        "[rank 2] KeyError: 'weight of 2'",
    ]


def test_a_result_that_cannot_be_pickled_names_the_rank():
    error, _ = error_of(on_rank.return_value, 2, "lambda")
    assert str(error).startswith("[rank 1] returned a function that cannot be pickled (")
    assert str(error).endswith("Return plain tensors, numbers, strings or containers of them.")


def test_a_result_that_cannot_be_unpickled_names_the_rank():
    error, _ = error_of(on_rank.return_value, 2, "explosive")
    assert str(error) == (
        "[rank 1] returned a value that cannot be unpickled in the process that started the ranks: "
        "TypeError: only unpickled on ranks"
    )


def test_a_hung_world_says_where_each_rank_is():
    error, seconds = error_of(on_rank.act_on, 4, 2, "hang", timeout=2, describe=describe)
    assert type(error) is RankTimeout
    title, *lines = str(error).splitlines()
    assert title == "4 of 4 ranks did not finish within timeout=2 s:"
    assert [line.split("] ")[0] for line in lines] == [f"  [{describe(rank)}" for rank in range(4)]
    for rank in (0, 1, 3):
        assert "] is in barrier (distributed/distributed_c10d.py:" in lines[rank]
        assert " called from launch/rank_functions.py:" in lines[rank]
        assert " act_on" in lines[rank]
    assert "] is at launch/rank_functions.py:" in lines[2]
    assert " act < launch/rank_functions.py:" in lines[2]
    assert "rank 2:\n" in vars(error)["traceback"]
    assert 2 <= seconds < 7


def test_two_ranks_in_different_collectives_are_both_told():
    error, seconds = error_of(on_rank.act_on, 2, 1, "gather", timeout=2, describe=describe)
    assert type(error) is RankTimeout
    _, waiting, other = str(error).splitlines()
    assert f"[{describe(0)}] is in barrier (" in waiting
    assert f"[{describe(1)}] is in all_gather (" in other
    assert " gather < launch/rank_functions.py:" in other
    assert seconds < 7


def test_a_stopped_rank_has_no_stack_but_is_ended():
    error, _ = error_of(on_rank.act_on, 2, 1, "stop", timeout=1)
    assert "[rank 1] gives no stack: it is stopped, or stuck outside Python" in str(error)


def test_a_rank_that_has_finished_is_not_called_stuck():
    error, _ = error_of(on_rank.hang_on, 2, 1, timeout=2)
    assert str(error).startswith("1 of 2 ranks did not finish within timeout=2 s:\n")
    assert "  [rank 0] has returned its result\n" in str(error)
    assert vars(error)["rank"] == 1


def test_events_restart_the_clock():
    # 2 s in all, at a limit of 1.6 s between two signs of life.
    assert run_ranks(on_rank.report_progress, 2, 5, 0.4, timeout=1.6) == [5, 5]


def test_what_a_rank_started_ends_with_it():
    error, _ = error_of(on_rank.start_helper_process, 2, 1)
    assert str(error) == "[rank 1] ValueError: leaves a child"
