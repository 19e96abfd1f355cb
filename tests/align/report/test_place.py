from __future__ import annotations

import math

import pytest

from paralign.align.report.place import dim_name, narrowest, places
from tests.align.report.reports import profile


def test_rows_and_ranks_are_named_where_the_error_is_in_a_part():
    assert places(profile(range(16, 32))) == [
        "rows 128-255 of 256 hold 99% of the error",
        "only 2 of the 4 ranks that hold it: 2, 3",
    ]


def test_an_error_that_is_everywhere_has_no_place():
    found = profile(range(32))
    found["ranks"] = [{**rank, "error": 1.0} for rank in found["ranks"]]
    assert places(found) == []


def test_one_index_reads_well():
    dim = {"size": 4, "starts": [0, 1, 2, 3], "error": [0.0, 0.0, 2.0, 0.0], "base": [1.0] * 4}
    assert places({"dims": [dim], "ranks": []}) == ["element 2 of 4 holds 99% of the error"]
    assert places({"dims": [dim, {**dim, "error": [1.0] * 4}], "ranks": []}) == [
        "row 2 of 4 holds 99% of the error"
    ]


def test_no_error_has_no_place():
    dim = {"size": 2, "starts": [0, 1], "error": [0.0, 0.0], "base": [1.0, 1.0]}
    assert places({"dims": [dim], "ranks": []}) == []


def test_nan_is_where_it_is():
    dim = {"size": 4, "starts": [0, 1, 2, 3], "error": [9.0, math.nan, 0.0, 0.0], "base": [1.0] * 4}
    assert places({"dims": [dim], "ranks": []}) == ["element 1 of 4 holds all that is no number"]


@pytest.mark.parametrize(
    ("errors", "run"),
    [
        ([0, 0, 1, 1, 0], (2, 4)),
        ([1, 0, 0, 0, 1], (0, 5)),
        ([10, 0, 0, 0, 0.5], (0, 1)),  # the small one is less than a hundredth, squared
        ([0, 0], None),
        ([], None),
        ([1e-200, 0, 0], (0, 1)),
    ],
)
def test_narrowest(errors, run):
    assert narrowest(errors) == run


def test_dims_have_the_names_people_use():
    assert [dim_name(0, 1), dim_name(0, 2), dim_name(1, 2), dim_name(2, 3)] == [
        "elements",
        "rows",
        "columns",
        "dim 2",
    ]
