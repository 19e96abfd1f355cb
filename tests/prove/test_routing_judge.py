"""What ranks counted of router choices decides, each rank by itself and all together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paralign.align.budget import Budget, Yardstick
from paralign.align.report.html import render_report
from paralign.align.verdict import ALIGNED, MISALIGNED, Report
from paralign.prove.routing import routing_folder
from paralign.prove.routing_judge import judge_routing
from tests.align.judging import check_schema
from tests.align.report.reports import finding
from tests.align.report.test_terminal import shown

EPS = 2.0**-7


def counted(**changes: Any) -> dict[str, Any]:
    """Return a router's counts on one rank, whose scores are off by as much as the reference's."""
    row = {
        "step": 0,
        "router": "layers.1.ffn.router",
        "tokens": 500,
        "choices": 1000,
        "flipped": 12,
        "expected": 10,
        "error": 4e-4 * EPS**2,
        "own_error": 4e-4 * EPS**2,
        "base": 4e-4,
    }
    return row | changes


def judged(tmp_path: Path, *ranks: list[dict[str, Any]], dtype: str = "bfloat16") -> Report:
    folder = routing_folder(tmp_path / "run")
    folder.mkdir()
    for rank, rows in enumerate(ranks):
        (folder / f"rank{rank:05d}.json").write_text(json.dumps(rows))
    yardstick = "fp64" if dtype == "float64" else "truth"
    report = Report(verdict=ALIGNED, why="all well", dtype=dtype, yardstick=yardstick)
    judge_routing(report, tmp_path / "run")
    check_schema(report)
    return report


def test_what_rounding_explains_is_told_and_not_held_against_the_run(tmp_path):
    report = judged(tmp_path, [counted()], [counted(flipped=9)])
    assert (report.verdict, report.findings) == (ALIGNED, [])
    routing = report.routing
    assert routing is not None and routing.replayed and not routing.failing
    (row,) = routing.routers
    assert (row.choices, row.flipped, row.name, row.step) == (2000, 21, "layers.1.ffn.router", 0)
    assert row.allowed == Budget("bfloat16", Yardstick.TRUTH).flips(20)
    assert row.eps == pytest.approx(1.0) and row.budget_eps == pytest.approx(3 * 1.0 + 2)
    assert report.to_dict()["routing"]["flipped"] == 21
    line = "21 of 2,000 (1.05%) would have been others; the reference's were replayed"
    assert line in " ".join(shown(report).split())
    assert "choices of layers.1" not in shown(report)
    assert "choices of layers.1.ffn.router at step 0" in shown(report, verbose=True)
    assert "choices that differ" in render_report(report)


def test_a_trace_without_counts_is_left_alone(tmp_path):
    assert judged(tmp_path).routing is None


def test_more_flips_than_rounding_makes_are_out_of_budget(tmp_path):
    report = judged(tmp_path, [counted()], [counted(flipped=90)])
    assert report.verdict == MISALIGNED
    assert report.why.startswith("first out of budget: choices of layers.1.ffn.router at step 0")
    (found,) = report.findings
    assert (found.component, found.cause) == ("forward", "single_rank")
    assert found.evidence["ranks_off"] == [1]
    assert "selects other experts than the reference although its scores agree" in found.fix
    assert "choices of layers.1.ffn.router at step 0" in shown(report)


def test_one_rank_is_not_thinned_out_by_the_others(tmp_path):
    ranks = [[counted(flipped=0)] for _ in range(15)]
    report = judged(tmp_path, *ranks, [counted(flipped=80)])
    assert report.routing is not None
    (row,) = report.routing.failing
    assert row.flipped <= row.allowed and row.ranks_off == [15]


def test_scores_that_are_off_are_out_of_budget_without_a_flip(tmp_path):
    off = counted(flipped=0, error=4e-4 * (8 * EPS) ** 2)
    report = judged(tmp_path, [counted(flipped=0)], [off], [off], [counted(flipped=0)])
    assert report.verdict == MISALIGNED
    (found,) = report.findings
    assert found.cause == "unknown" and found.evidence["ranks_off"] == [1, 2]
    assert "The scores that layers.1.ffn.router selects by are not the reference's" in found.fix


def test_nan_scores_are_out_of_budget(tmp_path):
    assert judged(tmp_path, [counted(error=float("nan"))]).verdict == MISALIGNED


def test_a_later_step_has_the_budget_of_later_steps(tmp_path):
    off = {"error": 4e-4 * (8 * EPS) ** 2}
    later = judged(tmp_path, [counted(), counted(step=1, **off)])
    assert later.verdict == ALIGNED and later.routing is not None
    assert [row.step for row in later.routing.routers] == [0, 1]


def test_where_none_is_expected_the_rate_of_all_routers_counts(tmp_path):
    quiet = counted(router="layers.2.ffn.router", expected=0, flipped=12)
    assert judged(tmp_path, [counted(expected=20), quiet]).verdict == ALIGNED
    lone = tmp_path / "other"
    lone.mkdir()
    assert judged(lone, [quiet]).verdict == MISALIGNED


def test_in_float64_choices_are_judged_by_what_follows_from_them(tmp_path):
    row = counted(expected=0, own_error=0.0, error=1.0, flipped=0)
    report = judged(tmp_path, [row], dtype="float64")
    assert report.verdict == ALIGNED  # scores are judged by what follows from them
    assert "router choices: all 1,000 are the reference's" in shown(report)
    other = tmp_path / "other"
    other.mkdir()
    report = judged(other, [row | {"flipped": 1}], dtype="float64")
    # Nothing was replayed, and loss and gradients agree: padding may go anywhere.
    assert (report.verdict, report.findings) == (ALIGNED, [])
    assert "nothing depends on it" in report.notes[-1]
    assert "router choices: 1 of 1,000 (0.10%) are not the reference's" in shown(report)


def test_an_explained_mismatch_keeps_its_explanation(tmp_path):
    folder = routing_folder(tmp_path / "run")
    folder.mkdir()
    (folder / "rank00000.json").write_text(json.dumps([counted(flipped=500)]))
    known = finding()
    report = Report(
        verdict=MISALIGNED, why="known", dtype="bfloat16", yardstick="truth", findings=[known]
    )
    judge_routing(report, tmp_path / "run")
    assert (report.why, report.findings) == ("known", [known])
    assert report.routing is not None and report.routing.failing
