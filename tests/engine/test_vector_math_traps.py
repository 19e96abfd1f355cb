"""The trap of a process's first elementwise functions; see docs/engine.md."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from paralign.vector_math import settle_vector_math
from tests.engine.traps import still_there

pytestmark = pytest.mark.long


def inexact_first_calls(num_processes: int, settle: bool, enough: int) -> int:
    """Count processes of two threads whose first logarithm differs from their second."""
    torch.set_num_threads(2)
    inexact = 0
    for _ in range(num_processes):
        if (child := os.fork()) == 0:  # a process that has not yet called any of MKL's functions
            if settle:
                settle_vector_math()
            x = torch.linspace(0.1, 0.9, 8192, dtype=torch.float64)
            os._exit(0 if torch.equal(x.log(), x.log()) else 1)
        inexact += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if inexact == enough:
            break
    return inexact


def in_a_new_process(*args: Any) -> int:
    """Call it where torch is imported and has computed nothing."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        inexact: int = pool.submit(inexact_first_calls, *args).result()
        return inexact


def test_first_calls_on_two_threads_are_exact_when_settled_only():
    seen = {
        "at once": in_a_new_process(4000, False, 1),
        "settled": in_a_new_process(800, True, 1),
    }
    still_there(
        "the-first-elementwise-function-may-be-inexact",
        broken=seen["at once"] > 0,
        cured=seen["settled"] == 0,
        seen=seen,
    )
