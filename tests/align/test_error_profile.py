from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paralign.align import Report
from paralign.align.error_profile import MOST_BINS
from paralign.align.trace import Kind
from tests.align.judging import judge, row
from tests.align.synthetic import toy_step


def report_of(tmp_path: Path, name: str, edit: Any, **options: Any) -> Report:
    step = toy_step()
    wrong = step[Kind.GRAD, name].clone()
    edit(wrong)
    return judge(tmp_path, [{**step, (Kind.GRAD, name): wrong}], **options)


def test_the_bins_along_each_dim_hold_the_error_that_is_there(tmp_path: Path) -> None:
    def edit(grad: torch.Tensor) -> None:
        grad[3, 1] += 3.0
        grad[3, 2] += 4.0

    report = report_of(tmp_path, "embed.weight", edit)
    profile = row(report, Kind.GRAD, "embed.weight").profile
    assert profile is not None
    rows, columns = profile["dims"]
    assert rows["size"] == 7
    assert rows["starts"] == list(range(7))
    assert [round(value, 9) for value in rows["error"]] == [0, 0, 0, 5, 0, 0, 0]
    assert [round(value, 9) for value in columns["error"]] == [0, 3, 4, 0]
    grad = toy_step()[Kind.GRAD, "embed.weight"]
    torch.testing.assert_close(
        torch.tensor(rows["base"], dtype=torch.float64), grad.norm(dim=1), rtol=1e-5, atol=0
    )


def test_ranks_say_which_part_they_hold_and_how_far_off_it_is(tmp_path: Path) -> None:
    def edit(grad: torch.Tensor) -> None:
        grad[5, 0] += 2.0

    report = report_of(tmp_path, "embed.weight", edit)
    profile = row(report, Kind.GRAD, "embed.weight").profile
    assert profile is not None
    found = {item["rank"]: (item["part"], item["error"]) for item in profile["ranks"]}
    # dp cuts 7 rows into 4 and 3; cp holds replicas.
    assert found[0] == found[1] == ([[0, 4], [0, 4]], 0.0)
    assert found[2] == found[3] == ([[4, 7], [0, 4]], 2.0)


def test_of_replicas_that_differ_the_one_furthest_off_is_shown(tmp_path: Path) -> None:
    def change(rank: int, entry: Any, local: torch.Tensor) -> torch.Tensor:
        if (entry.kind, entry.name, rank) == (Kind.GRAD, "norm.weight", 2):
            local[4] += 1.0
        return local

    report = judge(tmp_path, [toy_step()], change=change)
    profile = row(report, Kind.GRAD, "norm.weight").profile
    assert profile is not None
    assert [round(value, 9) for value in profile["dims"][0]["error"]] == [0, 0, 0, 0, 1]
    assert [item["rank"] for item in profile["ranks"] if item["error"]] == [2]


def test_a_long_dim_has_bins_of_about_equal_length(tmp_path: Path) -> None:
    size = 100
    step = {
        (kind, "w"): torch.ones(size, 2, dtype=torch.float64)
        for kind in (Kind.PARAM, Kind.GRAD, Kind.PARAM_AFTER)
    }
    wrong = step[Kind.GRAD, "w"].clone()
    wrong[99] = 2.0
    report = judge(tmp_path, [{**step, (Kind.GRAD, "w"): wrong}], [step])
    profile = row(report, Kind.GRAD, "w").profile
    assert profile is not None
    rows = profile["dims"][0]
    assert len(rows["starts"]) == len(rows["error"]) == MOST_BINS
    lengths = [b - a for a, b in zip(rows["starts"], [*rows["starts"][1:], size], strict=True)]
    assert set(lengths) <= {3, 4}
    held = [round(value**2 / 2) for value in rows["base"]]
    assert held == lengths
    assert [at for at, value in enumerate(rows["error"]) if value] == [MOST_BINS - 1]


def test_values_that_are_no_number_show_as_such(tmp_path: Path) -> None:
    def edit(grad: torch.Tensor) -> None:
        grad[2] = math.nan
        grad[4] *= 2

    report = report_of(tmp_path, "norm.weight", edit)
    profile = row(report, Kind.GRAD, "norm.weight").profile
    assert profile is not None
    error = profile["dims"][0]["error"]
    assert math.isnan(error[2])
    assert error[0] == 0.0
    assert error[4] > 0.0


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_tiny_and_huge_values_neither_vanish_nor_overflow(tmp_path: Path, size: float) -> None:
    step = {key: tensor for key, tensor in toy_step().items() if key[1] == "norm.weight"}
    reference = {**step, (Kind.GRAD, "norm.weight"): step[Kind.GRAD, "norm.weight"] * size}
    wrong = reference[Kind.GRAD, "norm.weight"].clone()
    wrong[1] += size
    report = judge(tmp_path, [{**reference, (Kind.GRAD, "norm.weight"): wrong}], [reference])
    profile = row(report, Kind.GRAD, "norm.weight").profile
    assert profile is not None
    assert [round(value / size, 5) for value in profile["dims"][0]["error"]] == [0, 1, 0, 0, 0]


def test_a_tensor_in_budget_has_no_profile(tmp_path: Path) -> None:
    report = judge(tmp_path, [toy_step()])
    assert {item.profile is None for item in report.tensors} == {True}
