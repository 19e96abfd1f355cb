"""Results come in order, from a few threads, and what a job raises is raised in its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from paralign.align.ahead import results_ahead


def test_results_come_in_the_order_of_the_jobs():
    def job(number: int) -> Callable[[], int]:
        def run() -> int:
            time.sleep(0.002 * (number % 3 == 0))
            return number**2

        return run

    found = list(results_ahead((number, job(number)) for number in range(20)))
    assert found == [(number, number**2) for number in range(20)]


def test_jobs_run_beside_each_other():
    both = threading.Barrier(2)

    def meet() -> int:
        return both.wait(timeout=20)

    found = list(results_ahead([("a", meet), ("b", meet)]))  # alone, the first would wait for ever
    assert sorted(result for _, result in found) == [0, 1]


def test_only_a_few_jobs_are_made_ahead():
    made = 0

    def jobs() -> Iterator[tuple[int, Callable[[], None]]]:
        nonlocal made
        for number in range(100):
            made += 1
            yield number, lambda: None

    first, _ = next(results_ahead(jobs()))
    assert first == 0
    assert made < 10


def test_what_a_job_raises_comes_in_its_place():
    def fails() -> int:
        raise ValueError("no such tensor")

    results = results_ahead([("a", lambda: 1), ("b", fails), ("c", lambda: 3)])
    assert next(results) == ("a", 1)
    with pytest.raises(ValueError, match="no such tensor"):
        next(results)
