"""The map of a report: layers by parameters, each cell the worst error of that kind in eps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from paralign.align.report.numbers import finite, short
from paralign.align.verdict import TensorRow

# The first number in a name counts layers; later ones (experts) share a column.
_LAYER = re.compile(r"^((?:.*?\.)?\d+)(?:\.(.+))?$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")

_WITHOUT_LAYER = ("input", "loss", "norm", "tokens")

LEVELS = (0.0, 1.0, 10.0, 100.0, 1e4, 1e8)
"""Upper ends of the colours, in eps; two more follow: larger, and no number."""
LEVEL_NAMES = ("0", "below 1", "1-10", "10-100", "100-1e4", "1e4-1e8", "1e8 and more", "no number")


@dataclass(frozen=True)
class Cell:
    """The worst of the tensors that share a place on the map."""

    row: int
    """Its place in the report's tensors."""
    text: str
    level: int
    """Which colour."""
    ok: bool


@dataclass(frozen=True)
class HeatMap:
    """All tensors of one kind, worst step."""

    kind: str
    groups: list[tuple[str, int]]
    """First line of the heading: modules, and how many columns each spans."""
    columns: list[str]
    """Second line of the heading."""
    lines: list[tuple[str, list[Cell | None]]]
    """Per layer its cells."""
    failing: int
    """Tensors out of budget, at any step."""


def heat_maps(rows: Sequence[TensorRow]) -> list[HeatMap]:
    """Return one map per kind of tensor, in causal order. What has no layer has none."""
    by_kind: dict[str, list[tuple[int, TensorRow]]] = {}
    for at, row in enumerate(rows):
        if row.kind not in _WITHOUT_LAYER:
            title = f"{row.kind} {row.state}" if row.state else row.kind
            by_kind.setdefault(title, []).append((at, row))
    return [_map(kind, items) for kind, items in by_kind.items()]


def split_name(name: str) -> tuple[str, str]:
    """Return the layer and the column of a tensor: ``layers.0`` and ``mlp.up.weight``."""
    if found := _LAYER.match(name):
        return found[1], _NUMBER.sub("*", found[2] or "")
    head, dot, tail = name.rpartition(".")
    return (head, tail) if dot else (name, "")


def level_of(eps: float) -> int:
    """Return the colour of an error in eps."""
    if not math.isfinite(eps):
        return len(LEVELS) + 1
    return next((level for level, end in enumerate(LEVELS) if eps <= end), len(LEVELS))


def _map(kind: str, items: Sequence[tuple[int, TensorRow]]) -> HeatMap:
    worst: dict[tuple[str, str], tuple[int, TensorRow]] = {}
    for at, row in items:
        place = split_name(row.name)
        known = worst.get(place)
        if known is None or _badness(row) > _badness(known[1]):
            worst[place] = at, row
    layers = list(dict.fromkeys(layer for layer, _ in worst))
    columns = _in_groups(column for _, column in worst)
    heads = [column.partition(".") for column in columns]
    parts = [(head, tail) if dot else ("", head) for head, dot, tail in heads]
    return HeatMap(
        kind=kind,
        groups=[(head, len(list(same))) for head, same in groupby(parts, key=lambda part: part[0])],
        columns=[tail for _, tail in parts],
        lines=[(layer, [_cell(worst.get((layer, c))) for c in columns]) for layer in layers],
        failing=sum(not row.ok for _, row in items),
    )


def _in_groups(columns: Iterable[str]) -> list[str]:
    """Bring columns of one module together, modules in the order in which they first appear."""
    groups: dict[str, dict[str, None]] = {}
    for column in columns:
        head, dot, _ = column.partition(".")
        groups.setdefault(head if dot else "", {})[column] = None
    return [column for group in groups.values() for column in group]


def _cell(item: tuple[int, TensorRow] | None) -> Cell | None:
    if item is None:
        return None
    at, row = item
    return Cell(row=at, text=short(row.eps).replace("e+", "e"), level=level_of(row.eps), ok=row.ok)


def _badness(row: TensorRow) -> tuple[bool, float, float]:
    return not row.ok, row.strain, finite(row.eps)
