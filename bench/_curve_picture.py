"""Draws loss curves as one SVG: two runs over each other, and below how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

WIDTH, LOSS_HEIGHT, GAP_HEIGHT = 430, 230, 150
LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 58, 14, 44, 46, 34
COLOURS = {"float32": "#1f6fb2", "bfloat16": "#c2571a"}
SMALLEST = 1e-9  # where equal losses are drawn on the logarithmic axis
STYLE = (
    "text{font:12px sans-serif;fill:#333}.t{font-weight:bold}line{stroke:#ddd}"
    "polyline{fill:none}.one{stroke-width:5;opacity:.35}.mesh{stroke-width:1.4}"
    "rect{fill:#fff}.gap{stroke-width:1.4}"
)

Curves = Mapping[str, Sequence[float]]
Scale = Callable[[float], float]


def picture(losses: Mapping[str, Curves], dtypes: Sequence[str]) -> str:
    """Return the SVG: a column for each run of ``losses``.

    Args:
        losses: Run -> ``"<dtype> one device"`` and ``"<dtype> mesh"`` -> the loss of every step.
        dtypes: Which dtypes to draw.
    """
    width = len(losses) * WIDTH
    height = TOP + LOSS_HEIGHT + BETWEEN + GAP_HEIGHT + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}"/>',
    ]
    for number, (name, curves) in enumerate(losses.items()):
        parts.append(f'<g transform="translate({number * WIDTH},0)">')
        parts += _column(name, curves, dtypes)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _column(name: str, curves: Curves, dtypes: Sequence[str]) -> Iterator[str]:
    steps = len(next(iter(curves.values())))
    x = _linear(0, max(1, steps - 1), LEFT, WIDTH - RIGHT)
    every = [loss for curve in curves.values() for loss in curve]
    low, high = min(every), max(every)
    bottom = TOP + LOSS_HEIGHT
    y = _linear(low, high, bottom, TOP)
    yield _text(LEFT, 16, name, cls="t")
    yield from _legend(dtypes)
    ticks = [low + (high - low) * part / 4 for part in range(5)]
    yield from _grid(y, [(tick, f"{tick:.2f}") for tick in ticks], "loss", TOP)
    for dtype in dtypes:
        for run, cls in (("one device", "one"), ("mesh", "mesh")):
            yield _line(x, y, curves[f"{dtype} {run}"], COLOURS[dtype], cls)
    top = bottom + BETWEEN
    gaps = {dtype: _gaps(curves, dtype) for dtype in dtypes}
    largest = max(SMALLEST * 10, *(gap for curve in gaps.values() for gap in curve))
    decades = range(round(math.log10(SMALLEST)), math.ceil(math.log10(largest)) + 1)
    log = _linear(decades[0], decades[-1], top + GAP_HEIGHT, top)

    def y_gap(gap: float) -> float:
        return log(math.log10(max(gap, SMALLEST)))

    marks = [(10.0**d, f"1e{d}") for d in decades[:: 1 + len(decades) // 6]]
    yield from _grid(y_gap, marks, "relative gap of mesh and one device", top)
    for dtype, curve in gaps.items():
        yield _line(x, y_gap, curve, COLOURS[dtype], "gap")
    for step in range(0, steps, max(1, steps // 5)):
        yield _text(x(step), top + GAP_HEIGHT + 18, str(step), anchor="middle")
    yield _text(WIDTH - RIGHT, top + GAP_HEIGHT + 32, "step", anchor="end")


def _gaps(curves: Curves, dtype: str) -> list[float]:
    pairs = zip(curves[f"{dtype} one device"], curves[f"{dtype} mesh"], strict=True)
    return [abs(a - b) / abs(a) for a, b in pairs]


def _legend(dtypes: Sequence[str]) -> Iterator[str]:
    """Say which line is which, in the top right corner."""
    for row, dtype in enumerate(dtypes):
        for column, (run, cls) in enumerate((("one device", "one"), ("mesh", "mesh"))):
            x, y = 190 + 148 * column, TOP + 14 + 16 * row
            yield (
                f'<polyline class="{cls}" stroke="{COLOURS[dtype]}" '
                f'points="{x},{y - 4} {x + 22},{y - 4}"/>'
            )
            yield _text(x + 27, y, f"{dtype}, {run}" if column == 0 else run)


def _grid(y: Scale, ticks: Sequence[tuple[float, str]], title: str, top: float) -> Iterator[str]:
    yield _text(LEFT, top - 6, title)
    for value, label in ticks:
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        yield _text(LEFT - 6, y(value) + 4, label, anchor="end")


def _line(x: Scale, y: Scale, values: Sequence[float], colour: str, cls: str) -> str:
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values))
    return f'<polyline class="{cls}" stroke="{colour}" points="{points}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", cls: str = "") -> str:
    kind = f' class="{cls}"' if cls else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{text}</text>'


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)
