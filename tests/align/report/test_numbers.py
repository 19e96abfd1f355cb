from __future__ import annotations

import math

import pytest

from paralign.align.report.numbers import expected_and_found, finite, seconds, short


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.123"),
        (3.14159, "3.14"),
        (99.96, "100"),
        (999.6, "1000"),
        (1234.4, "1234"),
        (1e4, "1.0e+04"),
        (4.5e15, "4.5e+15"),
        (-2.5, "-2.5"),
        (1e-3, "1.0e-03"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_short(value, text):
    assert short(value) == text


def test_what_is_no_number_sorts_as_the_worst():
    assert sorted([math.nan, 3.0, math.inf, 1.0], key=finite)[:2] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1.0, 2.0), "1 -> 2"),
        ((0.1, 0.10001), "0.1 -> 0.10001"),
        ((0.1, 0.100000001), "0.1 -> 0.100000001"),
        ((0.1, 0.1000000000001), "0.1 -> 0.1"),
        ((1.0, math.nan), "1 -> nan"),
    ],
)
def test_expected_and_found_have_digits_enough_to_differ(values, text):
    assert expected_and_found(values) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12 s"), (42.4, "42 s"), (185.2, "3 min 5 s")]
)
def test_seconds(value, text):
    assert seconds(value) == text
