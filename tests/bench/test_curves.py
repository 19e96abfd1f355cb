"""The curves in docs/ are what was measured, and a gap is seen wherever it is."""

from __future__ import annotations

import json
import math

from bench._curve_picture import picture
from bench.curves import DTYPES, ROOT, RUNS, STEPS, gap

LOSSES = json.loads((ROOT / "docs" / "moe_curves.json").read_text())


def test_a_gap_is_the_largest_of_all_steps():
    curves = {"float32 one device": [4.0, 2.0, 1.0], "float32 mesh": [4.0, 2.5, 1.0]}
    assert gap(curves, "float32") == 0.25
    assert gap({**curves, "float32 mesh": curves["float32 one device"]}, "float32") == 0


def test_the_picture_is_drawn_from_the_losses_beside_it():
    assert (ROOT / "docs" / "moe_curves.svg").read_text() == picture(LOSSES, DTYPES)
    assert LOSSES.keys() == RUNS.keys()
    for curves in LOSSES.values():
        assert curves.keys() == {f"{d} {run}" for d in DTYPES for run in ("one device", "mesh")}
        assert all(len(c) == STEPS and all(map(math.isfinite, c)) for c in curves.values())


def test_runs_learn_and_gaps_are_as_the_page_says():
    page = (ROOT / "docs" / "experts.md").read_text()
    for example, curves in LOSSES.items():
        assert all(curve[-1] < 0.8 * curve[0] for curve in curves.values())
        for dtype in DTYPES:
            assert f"{gap(curves, dtype):.1e}" in page, (example, dtype)
        assert gap(curves, "float32") < 1e-4 < 2e-2 > gap(curves, "bfloat16")


def test_every_loss_is_a_point_and_equal_curves_lie_on_each_other():
    losses = [5.0, 4.0, 3.5]
    curves = {f"{d} {run}": losses for d in DTYPES for run in ("one device", "mesh")}
    drawn = picture({"a": curves, "b": curves}, DTYPES)
    lines = [line for line in drawn.splitlines() if "polyline class" in line]
    # In each column: four of the legend, four curves, two gaps.
    assert len(lines) == 2 * (4 + 4 + 2)
    points = [line.split('points="')[1].split('"')[0] for line in lines if "gap" not in line]
    assert points.count(points[4]) == 2 * 4 and len(points[4].split()) == 3
