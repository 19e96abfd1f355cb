from __future__ import annotations

import math

import pytest

from paralign.train.schedule import Schedule


def factors(**settings) -> list[float]:
    schedule = Schedule(**settings)
    return [schedule.factor(step) for step in range(schedule.num_steps)]


def test_warm_up_ends_at_the_full_rate_and_no_step_stands_still():
    assert factors(num_steps=6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(num_steps=2) == [1.0, 1.0]


def test_cosine_ends_at_the_least_rate():
    found = factors(name="cosine", num_steps=12, warmup_steps=2, min_ratio=0.1)
    assert found[:2] == [0.5, 1.0]
    assert found[-1] == pytest.approx(0.1)
    assert found[6] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    assert found[2:] == sorted(found[2:], reverse=True)


def test_wsd_is_stable_and_then_linear():
    found = factors(name="wsd", num_steps=10, warmup_steps=2, decay_steps=4, min_ratio=0.2)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_a_step_after_the_end_keeps_the_last_rate():
    schedule = Schedule(name="cosine", num_steps=4, min_ratio=0.1)
    assert schedule.factor(9) == pytest.approx(0.1)
