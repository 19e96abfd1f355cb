from __future__ import annotations

from fractions import Fraction

import pytest

from paralign.align.explain.candidates import (
    Candidate,
    fraction_factor,
    meanings,
    names_cause,
    names_place,
    read_candidate,
    simple_factor,
    sources_of,
)
from paralign.align.verdict import Finding


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


def test_fractions_need_a_tight_tolerance() -> None:
    assert fraction_factor(15 / 4, 1e-12) == Fraction(15, 4)
    assert fraction_factor(15 / 4 + 1e-9, 1e-12) is None
    assert fraction_factor(15 / 4, 1e-2) is None  # some fraction always fits


def test_every_size_that_could_give_the_factor_is_listed() -> None:
    sizes = {"pp": 1, "dp": 2, "cp": 2, "tp": 4, "num_microbatches": 4}
    four = [("tp",), ("num_microbatches",), ("dp", "cp")]
    assert sources_of(Fraction(4), sizes) == four
    assert sources_of(Fraction(1, 4), sizes) == four
    assert sources_of(Fraction(2), sizes) == [("dp",), ("cp",)]
    assert sources_of(Fraction(3), sizes) == []
    assert sources_of(Fraction(3, 2), sizes) == []


@pytest.mark.parametrize("axes", [(), ("dp",), ("dp", "cp")])
def test_candidates_are_read_as_they_are_written(axes: tuple[str, ...]) -> None:
    one = Candidate("reduction", "double_reduction", axes, "summed twice: dp=2")
    assert read_candidate(str(one)) == one._replace(meaning="")
    with pytest.raises(ValueError, match="is not a candidate"):
        read_candidate("dp=2")


def test_candidates_count_only_where_a_run_decides() -> None:
    other = str(Candidate("backward", "constant_factor"))
    finding = Finding("reduction", "double_reduction", "fix", axes=["dp"], candidates=[other])
    assert names_cause(finding, "reduction", ["dp"], "double_reduction")
    assert not names_cause(finding, "reduction", [], "double_reduction")
    assert not names_place(finding, "backward", [])
    finding.separate_by = "another run"
    assert names_place(finding, "backward", [])
    assert names_cause(finding, "backward", [], "constant_factor")
    assert not names_cause(finding, "backward", [], "double_reduction")
    assert len(meanings(finding)) == 2
