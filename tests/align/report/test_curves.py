from __future__ import annotations

import math

from paralign.align.report.curves import HEIGHT, LEFT, RIGHT, WIDTH, curves
from paralign.align.verdict import TensorRow
from tests.align.report.reports import row


def losses(*pairs: tuple[float, float], kind: str = "loss") -> list[TensorRow]:
    return [
        row(
            kind,
            kind,
            step,
            eps=abs(a - b) / abs(a) * 2**52 if math.isfinite(b) else math.nan,
            budget=50.0,
            worst_values=(a, b),
        )
        for step, (a, b) in enumerate(pairs)
    ]


def points(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (point.split(",") for point in text.split())]


def test_both_runs_are_overlaid_on_one_scale():
    [curve] = curves(losses((3.0, 3.0), (2.0, 2.5), (1.0, 1.0)))
    assert curve.values is not None
    lines = {name: points(text) for name, text in curve.values.lines}
    assert [x for x, _ in lines["reference"]] == [LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT]
    assert lines["reference"][0] == lines["parallel"][0]
    assert lines["reference"][1][1] > lines["parallel"][1][1]  # y grows downwards
    assert all(0 < y < HEIGHT for line in lines.values() for _, y in line)
    assert [tick.text for tick in curve.values.x_ticks] == ["0", "1", "2"]
    assert [tick.text for tick in curve.values.y_ticks] == ["1", "2", "3"]


def test_the_difference_has_its_budget_and_its_wrong_steps_marked():
    [curve] = curves(losses((3.0, 3.0), (2.0, 2.5)))
    assert curve.differences is not None
    lines = {name: points(text) for name, text in curve.differences.lines}
    budget = lines["budget"][0][1]
    (_, low), (_, high) = lines["difference"]
    assert high < budget < low
    assert [name for _, _, name in curve.differences.dots] == ["difference", "bad"]


def test_one_step_is_no_curve():
    [curve] = curves(losses((3.0, 3.5)))
    assert curve.values is None
    assert curve.steps[0][:3] == (0, 3.0, 3.5)


def test_loss_and_norm_come_apart_and_nothing_is_nothing():
    found = curves([*losses((1.0, 1.0)), *losses((2.0, 2.0), kind="norm")])
    assert [curve.title for curve in found] == ["Loss", "Gradient norm before clipping"]
    assert curves([row("grad", "w")]) == []


def test_a_value_that_is_no_number_is_left_out_of_the_line():
    [curve] = curves(losses((3.0, 3.0), (2.0, math.nan), (1.0, 1.0)))
    assert curve.values is not None
    lines = dict(curve.values.lines)
    assert len(points(lines["parallel"])) == 2
    assert len(points(lines["reference"])) == 3


def test_a_flat_loss_and_many_steps_are_drawn():
    [curve] = curves(losses(*[(1.0, 1.0)] * 500))
    assert curve.values is not None
    assert len(curve.values.x_ticks) == 10
    assert curve.values.dots == []
    assert curve.values.y_ticks
