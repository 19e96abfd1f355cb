"""Loss and gradient norm of both runs over the steps, as the geometry of a drawing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paralign.align.report.numbers import short
from paralign.align.verdict import TensorRow

WIDTH, HEIGHT, DIFFERENCE_HEIGHT = 640, 220, 130
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 28
_SMALLEST = 1e-18
"""Where a difference of nothing is drawn on a logarithmic axis."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis: where, and what it says."""

    at: float
    text: str


@dataclass(frozen=True)
class Panel:
    """One drawing: lines as SVG point lists, and their axes."""

    height: int
    lines: list[tuple[str, str]]
    """Class name and points."""
    dots: list[tuple[float, float, str]]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True)
class Curve:
    """What both runs say about one number, step by step."""

    title: str
    steps: list[tuple[int, float, float, TensorRow]]
    """Step, reference, parallel, row."""
    values: Panel | None
    """Both, overlaid; None where one step is all there is."""
    differences: Panel | None
    """How far apart they are, relatively, and the budget, on a logarithmic axis."""


def curves(rows: Sequence[TensorRow]) -> list[Curve]:
    """Return the curve of the loss and that of the gradient norm, where they were recorded."""
    found = []
    for kind, title in (("loss", "Loss"), ("norm", "Gradient norm before clipping")):
        steps = [
            (row.step, *row.worst_values, row)
            for row in rows
            if row.kind == kind and row.worst_values is not None
        ]
        if steps:
            found.append(_curve(title, steps))
    return found


def _curve(title: str, steps: list[tuple[int, float, float, TensorRow]]) -> Curve:
    if len(steps) < 2:
        return Curve(title, steps, None, None)
    return Curve(title, steps, _values(steps), _differences(steps))


def _values(steps: Sequence[tuple[int, float, float, TensorRow]]) -> Panel:
    numbers = [v for _, a, b, _ in steps for v in (a, b) if math.isfinite(v)] or [0.0]
    low, high = min(numbers), max(numbers)
    pad = 0.06 * (high - low) or abs(high) * 0.01 or 1.0
    low, high = low - pad, high + pad
    x = _across([step for step, *_ in steps])
    y = _up(low, high, HEIGHT)
    reference = [(x(step), y(value)) for step, value, _, _ in steps if math.isfinite(value)]
    parallel = [(x(step), y(value)) for step, _, value, _ in steps if math.isfinite(value)]
    return Panel(
        height=HEIGHT,
        lines=[("reference", _points(reference)), ("parallel", _points(parallel))],
        dots=_dots(parallel, "parallel"),
        x_ticks=_step_ticks([step for step, *_ in steps], x),
        y_ticks=[Tick(y(value), f"{value:.4g}") for value in _round_values(low, high)],
    )


def _differences(steps: Sequence[tuple[int, float, float, TensorRow]]) -> Panel:
    found = [(step, row.rel_l2, row) for step, _, _, row in steps]
    budgets = [
        row.budget_eps * row.rel_l2 / row.eps
        for _, _, row in found
        if row.budget_eps and row.eps and math.isfinite(row.eps) and row.rel_l2
    ]
    budget = budgets[0] if budgets else None
    numbers = [max(value, _SMALLEST) for _, value, _ in found if math.isfinite(value)]
    numbers += [] if budget is None else [budget]
    low = math.floor(math.log10(min(numbers, default=_SMALLEST)))
    high = max(math.ceil(math.log10(max(numbers, default=1.0))), low + 1)
    x = _across([step for step, *_ in found])
    y = _up(low, high, DIFFERENCE_HEIGHT)

    def place(step: int, value: float) -> tuple[float, float]:
        return x(step), y(math.log10(max(value, _SMALLEST)))

    points = [place(step, value) for step, value, _ in found if math.isfinite(value)]
    lines = [("difference", _points(points))]
    if budget is not None:
        ends = [place(found[0][0], budget), place(found[-1][0], budget)]
        lines.append(("budget", _points(ends)))
    every = max(1, (high - low) // 4)
    return Panel(
        height=DIFFERENCE_HEIGHT,
        lines=lines,
        dots=[
            (*place(step, value), "difference" if row.ok else "bad")
            for step, value, row in found
            if math.isfinite(value) and (len(found) <= 40 or not row.ok)
        ],
        x_ticks=_step_ticks([step for step, *_ in found], x),
        y_ticks=[Tick(y(power), f"1e{power:d}") for power in range(low, high + 1, every)],
    )


def _across(steps: Sequence[int]) -> Callable[[float], float]:
    first, last = min(steps), max(steps)
    width = WIDTH - LEFT - RIGHT
    return lambda step: round(LEFT + width * (step - first) / ((last - first) or 1), 1)


def _up(low: float, high: float, height: int) -> Callable[[float], float]:
    room = height - TOP - BOTTOM
    return lambda value: round(TOP + room * (high - value) / (high - low), 1)


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)


def _dots(points: Sequence[tuple[float, float]], name: str) -> list[tuple[float, float, str]]:
    return [(x, y, name) for x, y in points] if len(points) <= 40 else []


def _step_ticks(steps: Sequence[int], x: Callable[[float], float]) -> list[Tick]:
    every = max(1, -(-len(steps) // 10))
    return [Tick(x(step), str(step)) for step in steps[::every]]


def _round_values(low: float, high: float) -> list[float]:
    """Return about four round numbers between ``low`` and ``high``."""
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step) + 1)]


def describe_step(step: tuple[int, float, float, TensorRow]) -> str:
    """Return one step in words: both values and how far apart they are."""
    _, reference, parallel, row = step
    return (
        f"reference {reference:.10g}, parallel {parallel:.10g}, relative difference "
        f"{short(row.rel_l2)}"
    )
