"""The study of ``python -m tests.equivalence.random_configs`` in small."""

from __future__ import annotations

import random

import pytest

from tests.equivalence.random_configs import MISTAKES, _problem, draw, page, study


def test_the_same_seed_draws_the_same_configs():
    first, again, other = (draw(random.Random(seed)) for seed in ("0-1", "0-1", "0-2"))
    assert first == again != other


def test_mistakes_are_part_of_it():
    mistakes = [draw(random.Random(f"0-{number}"))[1] for number in range(200)]
    assert 30 < sum(mistake is not None for mistake in mistakes) < 70
    assert len(MISTAKES) == 5


@pytest.mark.parametrize(
    ("status", "said", "verdict", "mistake", "problem"),
    [
        (0, "ALIGNED", "aligned", None, None),
        (0, "ALIGNED", "aligned", "mesh.cp=0", "the mistake was not noticed"),
        (0, "", None, None, "exit status 0 without a verdict"),
        (1, "MISALIGNED", "misaligned", None, "exit status 1"),
        (3, "error: rank 1", None, None, "exit status 3"),
        (2, "error: mesh.cp=0 is wrong. Use 1.", None, "mesh.cp=0", None),
        (2, "error: mesh.cp=0 is wrong.", None, "mesh.cp=0", "the message names no fix"),
        (2, "Traceback (most recent call last)", None, None, "a traceback"),
    ],
)
def test_what_is_allowed(status, said, verdict, mistake, problem):
    report = None if verdict is None else {"verdict": verdict}
    assert _problem(status, said, report, mistake) == problem


@pytest.mark.ranks
def test_some_configs(tmp_path):
    outcomes = list(study(4, 33, tmp_path))
    assert [(o.text, o.said) for o in outcomes if o.problem is not None] == []
    assert {o.status for o in outcomes} == {0, 2}
    assert "| anything else | 0 |" in page(outcomes, 33)
