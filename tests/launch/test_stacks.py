from __future__ import annotations

from pathlib import Path

import pytest
import torch

import paralign.launch
from paralign.launch.stacks import Frame, describe_place, parse_main_thread

LAUNCH = Path(paralign.launch.__file__).parent
TORCH = Path(torch.__file__).parent

DUMP = f"""Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 930 in wait
  File "{LAUNCH}/rank.py", line 160 in end_with_parent

Current thread 0x00007f02 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 5021 in barrier
  File "{TORCH}/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/model/step.py", line 33 in <lambda>
  File "/home/me/model/step.py", line 12 in step
  File "/home/me/train.py", line 4 in main
  File "/home/me/train.py", line 2 in outer
  File "{LAUNCH}/rank.py", line 99 in _run_job
  File "{LAUNCH}/rank.py", line 70 in rank_main
  File "/usr/lib/python3.11/multiprocessing/process.py", line 108 in run
"""


def frame(file: str, line: int, function: str) -> Frame:
    return Frame(file=file, line=line, function=function)


def test_the_main_thread_is_found():
    frames = parse_main_thread(DUMP)
    assert [f.function for f in frames][:4] == ["barrier", "wrapper", "<lambda>", "step"]
    assert len(frames) == 9


def test_of_two_dumps_the_last_counts():
    assert (
        parse_main_thread(DUMP + DUMP.replace("barrier", "all_reduce"))[0].function == "all_reduce"
    )


def test_a_stack_that_is_cut_off_before_the_launcher_is_the_last_one():
    cut = DUMP[: DUMP.index(f'  File "{LAUNCH}/rank.py", line 99')]
    assert parse_main_thread(cut)[0].function == "barrier"


@pytest.mark.parametrize("dump", ["", "Fatal Python error: Aborted\n"])
def test_no_stack_has_no_frames(dump):
    assert parse_main_thread(dump) == []


def test_a_place_names_the_operation_and_the_callers():
    assert describe_place(parse_main_thread(DUMP)) == (
        "in barrier (distributed/distributed_c10d.py:5021), called from model/step.py:33 <lambda> "
        "< model/step.py:12 step < me/train.py:4 main"
    )


def test_a_place_in_the_users_code_needs_no_operation():
    assert describe_place([frame("/a/b.py", 3, "f")]) == "at a/b.py:3 f"


def test_a_place_before_the_users_code_is_named_all_the_same():
    frames = [
        frame(f"{TORCH}/distributed/rendezvous.py", 7, "wait"),
        frame(f"{LAUNCH}/rank.py", 1, "x"),
    ]
    assert describe_place(frames) == "in wait (distributed/rendezvous.py:7)"
    assert describe_place([]) == "at an unknown place"
