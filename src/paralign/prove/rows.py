"""One row for the same parameter of many layers, so that a declaration fits on a screen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from paralign.declaration import ParameterDeclaration
from paralign.parallel.data import ROOT_UNIT

# The first number in a name counts layers; later ones are the user's own.
_LAYER = re.compile(r"^(.*?\.)(\d+)(?=\.|$)")
_HOLE = "#"


@dataclass(frozen=True, kw_only=True)
class Fate:
    """Where parameters live and what their gradients are sums of, in words."""

    placement: str
    summed: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One parameter, or the same one of several layers.

    Attributes:
        name: ``layers.*.norm.weight`` for all layers, ``layers.0,2-3.norm.weight`` for some.
        shape: Such as ``256x64``.
        stages: Such as ``0-1``.
        unit: The modules gathered and reduced with it, or ``root``.
    """

    name: str
    shape: str
    stages: str
    unit: str


def rows_of(
    declared: Sequence[ParameterDeclaration], *, verbose: bool = False
) -> dict[Fate, list[Row]]:
    """Return the rows of every fate that a parameter has, in model order.

    Args:
        declared: All parameters.
        verbose: One row for each parameter.
    """
    every: dict[str, set[int]] = {}
    for p in declared:
        name, _, layer = _open(p, verbose)
        every.setdefault(name, set()).update(layer)
    members: dict[tuple[Fate, str, str, str], list[ParameterDeclaration]] = {}
    for p in declared:
        name, unit, _ = _open(p, verbose)
        members.setdefault((_fate(p), name, _shape(p), unit), []).append(p)
    rows: dict[Fate, list[Row]] = {}
    for (fate, name, shape, unit), group in members.items():
        layers = {layer for p in group for layer in _open(p, verbose)[2]}
        text = "*" if len(layers) > 1 and layers == every[name] else ranges(layers)
        rows.setdefault(fate, []).append(
            Row(
                name=name.replace(_HOLE, text),
                shape=shape,
                stages=ranges(p.stage for p in group),
                unit=unit.replace(_HOLE, text),
            )
        )
    return rows


def ranges(numbers: Iterable[int]) -> str:
    """Write a set of numbers shortly: ``0-2,5``."""
    # Neighbours have the same distance from their place in the order.
    runs = groupby(enumerate(sorted(set(numbers))), key=lambda item: item[1] - item[0])
    found = [[number for _, number in run] for _, run in runs]
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in found)


def _open(p: ParameterDeclaration, verbose: bool) -> tuple[str, str, list[int]]:
    """Return name and unit with a hole where the layer's number was, and that number."""
    unit = "root" if p.unit == ROOT_UNIT else p.unit
    found = None if verbose else _LAYER.match(p.name)
    if found is None:
        return p.name, unit, []
    layer = re.escape("".join(found.groups()))
    hole = found[1] + _HOLE
    rest = p.name[found.end() :]
    return hole + rest, re.sub(rf"(?<![\w.]){layer}(?!\w)", hole, unit), [int(found[2])]


def _fate(p: ParameterDeclaration) -> Fate:
    by_placement: dict[str, list[str]] = {}
    for axis, placement in p.placements.items():
        by_placement.setdefault(placement, []).append(axis)
    words = {"stage": "one stage", "replicate": "replicated"}
    placed = [
        f"{words.get(how, how)} {'of' if how == 'stage' else 'over'} {' x '.join(axes)}"
        for how, axes in sorted(by_placement.items(), key=lambda item: item[0] != "stage")
    ]
    summed = f"summed over {' x '.join(p.partial_over)}" if p.partial_over else "whole on each rank"
    if p.tied_to:
        summed += f", then added to that of {p.tied_to} on both stages"
    return Fate(
        placement=", ".join(placed) or "whole on the one rank",
        summed=summed if p.trainable else "none (frozen)",
    )


def _shape(p: ParameterDeclaration) -> str:
    return "x".join(map(str, p.shape)) or "scalar"
