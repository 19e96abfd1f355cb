from __future__ import annotations

from fractions import Fraction

import pytest

from paralign.align.explain import factor_candidates, simple_factor


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        (2.0, Fraction(2)),
        (0.25, Fraction(1, 4)),
        (-3.0, Fraction(-3)),
        (1 / 3 * (1 + 1e-9), Fraction(1, 3)),
        (1.0, Fraction(1)),
        (2.5, None),
        (65.0, None),
        (0.0, None),
        (float("nan"), None),
        (float("inf"), None),
        (1e-300, None),
    ],
)
def test_whole_factors_and_their_inverses(scale: float, factor: Fraction | None) -> None:
    assert simple_factor(scale) == factor


def test_every_size_that_could_give_the_factor_is_listed() -> None:
    sizes = {"pp": 1, "dp": 2, "cp": 2, "tp": 4, "num_microbatches": 4}
    four = ["tp=4", "num_microbatches=4", "dp=2 x cp=2"]
    assert factor_candidates(Fraction(4), sizes) == four
    assert factor_candidates(Fraction(1, 4), sizes) == four
    assert factor_candidates(Fraction(2), sizes) == ["dp=2", "cp=2"]
    assert factor_candidates(Fraction(3), sizes) == []
