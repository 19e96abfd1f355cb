"""Find out from micro-batch gradients how a gradient was put together, and how it should be.

Every rank's gradient of every micro-batch, before any reduction, is a *contribution*. The reference
is a weighted sum of them, and so is what the run under test made. Least squares on a sample gives
both sets of weights; the whole tensor then confirms them. Where the weights differ is what went
wrong: a zero is a contribution that never arrived, weights that follow the ranks are another group,
weights inverse to the number of tokens are a mean of means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.explain.context import Context, Label, Recipe
from paralign.align.explain.proof import (
    Held,
    Mix,
    Proof,
    Readable,
    error_left,
    limit_of,
    parts_of,
    proves,
)
from paralign.align.explain.weights_of import read_weights
from paralign.align.judge import Compared
from paralign.align.pair import Piece, Side, Term
from paralign.align.trace import Kind
from paralign.layout import Box, LocalMap, boxes

_SAMPLE = 2048
_MOST_CONTRIBUTIONS = 512


@dataclass(frozen=True)
class Contribution:
    """One rank's gradient of one micro-batch, readable where the rank holds it."""

    label: Label
    piece: Piece

    def fetch(self, box: Box) -> Tensor:
        """Return the part at ``box``; nothing where the rank holds none of it."""
        whole = torch.zeros(box.shape, dtype=torch.float64)
        for held in boxes(self.piece.map):
            both = held.intersect(box)
            if both is not None:
                at = zip(both[1].start, both[1].shape, box.start, strict=True)
                region = tuple(slice(a - first, a - first + n) for a, n, first in at)
                whole[region] = self.piece.read(both[0])
        return whole


def find_recipe(context: Context, item: Compared) -> Recipe | None:
    """Return the weights of the contributions to ``item``; None where they are not determined."""
    if limit_of(item) is None or item.moment.kind != Kind.GRAD:
        return None
    for side in (context.parallel, context.reference):
        contributions = _contributions(side, item)
        recipe = _known_recipe(context, item, contributions) or _recipe_of(item, contributions)
        if recipe is not None:
            if recipe not in context.recipes:
                context.recipes.append(recipe)
            return recipe
    return None


def _known_recipe(
    context: Context, item: Compared, contributions: Sequence[Contribution]
) -> Recipe | None:
    """Return the recipe of another tensor if it fits: a small one does not determine its own."""
    labels = tuple(contribution.label for contribution in contributions)
    limit = limit_of(item) or 0.0
    members = [[column] for column in range(len(labels))]
    for recipe in context.recipes if labels else []:
        if recipe.labels != labels:
            continue
        worst = 0.0
        for pieces in item.side.replicas.values():
            first = pieces[0]
            worst = max(
                worst, _error(first, item.base, recipe.right, members, contributions, limit)
            )
            for piece in pieces:
                made = recipe.made.get(piece.rank)
                if made is None or not worst <= limit:
                    worst = math.inf
                    break
                worst = max(worst, _error(piece, None, made, members, contributions, limit))
        if worst <= limit:
            return recipe
    return None


def prove_recipe(context: Context, item: Compared) -> Proof | None:
    """Return the proof of what the weights of the contributions say, if they say anything."""
    recipe = find_recipe(context, item)
    if recipe is None or not proves(item, recipe.left):
        return None
    return read_weights(context, item, recipe)


def _contributions(side: Side, item: Compared) -> list[Contribution]:
    found = []
    for index in side.reader.ranks:
        for entry in index.tensors:
            if (
                entry.kind == Kind.MICRO_GRAD
                and entry.step == item.moment.step
                and item.row.name in (entry.name, *entry.aliases)
                and entry.file is not None
                and entry.shape == item.base.shape
            ):
                piece = Piece(index.rank, entry.map, (Term(1.0, entry),), side.reader)
                found.append(Contribution(Label(index.rank, entry.micro_batch or 0), piece))
    return found


def _recipe_of(item: Compared, contributions: Sequence[Contribution]) -> Recipe | None:
    """Solve for the weights on one distinct part after the other, and join them."""
    if not 1 < len(contributions) <= _MOST_CONTRIBUTIONS:
        return None
    made: dict[int, tuple[float, ...]] = {}
    right: tuple[float, ...] | None = None
    labels = tuple(contribution.label for contribution in contributions)
    worst = 0.0
    for held, pieces in item.side.replicas.items():
        solved = _solve(item, held, pieces, contributions)
        if solved is None:
            return None
        base_weights, per_rank, left = solved
        worst = max(worst, left)
        made |= per_rank
        if right is not None and not _alike(right, base_weights):
            return None
        right = base_weights
    return None if right is None else Recipe(labels, right, made, worst)


def _solve(
    item: Compared,
    held: LocalMap,
    pieces: Sequence[Held],
    contributions: Sequence[Contribution],
) -> tuple[tuple[float, ...], dict[int, tuple[float, ...]], float] | None:
    sample = [box for part in parts_of(pieces[0]) for box in part.split(_SAMPLE)][:4]
    if not sample:
        return None
    columns = torch.stack(
        [torch.cat([c.fetch(box).reshape(-1) for box in sample]) for c in contributions], dim=1
    )
    columns, members = _distinct(columns)
    if columns.shape[0] < columns.shape[1]:
        return None
    norm = float(torch.linalg.vector_norm(columns))
    if not norm > 0.0 or torch.linalg.matrix_rank(columns, rtol=1e-9) < columns.shape[1]:
        return None
    limit = limit_of(item) or 0.0

    def weights(target: Tensor) -> list[float]:
        solution = torch.linalg.lstsq(columns, target[:, None]).solution[:, 0]
        # What a low-precision run cannot resolve is no weight: whole numbers are meant.
        return [_nearby(float(w), max(limit, 1e-9)) for w in solution]

    worst = 0.0
    base_weights = weights(torch.cat([item.base.fetch(box).reshape(-1) for box in sample]))
    worst = max(worst, _error(pieces[0], item.base, base_weights, members, contributions, limit))
    per_rank: dict[int, tuple[float, ...]] = {}
    for piece in pieces:
        found = weights(torch.cat([piece.read(box).reshape(-1) for box in sample]))
        worst = max(worst, _error(piece, None, found, members, contributions, limit))
        per_rank[piece.rank] = _spread(found, members, len(contributions))
    if not worst <= limit:
        return None
    return _spread(base_weights, members, len(contributions)), per_rank, worst


def _distinct(columns: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Join contributions that are equal (ranks that compute the same) into one column each."""
    members: list[list[int]] = []
    for column in range(columns.shape[1]):
        same = next((m for m in members if torch.equal(columns[:, m[0]], columns[:, column])), None)
        if same is None:
            members.append([column])
        else:
            same.append(column)
    return columns[:, [group[0] for group in members]], members


def _spread(
    weights: Sequence[float], members: Sequence[Sequence[int]], total: int
) -> tuple[float, ...]:
    """Give every contribution its share of its column's weight."""
    result = [0.0] * total
    for weight, group in zip(weights, members, strict=True):
        for column in group:
            result[column] = weight / len(group)
    return tuple(result)


def _error(
    piece: Held,
    base: Readable | None,
    weights: Sequence[float],
    members: Sequence[Sequence[int]],
    contributions: Sequence[Contribution],
    limit: float,
) -> float:
    """Return the error of a set of weights on all of ``piece``'s part."""
    terms = [
        (weight, contributions[group[0]])
        for weight, group in zip(weights, members, strict=True)
        if weight
    ]
    if not terms:
        return math.inf
    mix = Mix(tuple(terms))
    norm = math.hypot(*(float(torch.linalg.vector_norm(mix.fetch(box))) for box in parts_of(piece)))
    if not norm > 0.0:  # a part of which no contribution holds anything
        target = [piece.read(box) if base is None else base.fetch(box) for box in parts_of(piece)]
        return math.inf if any(bool((part != 0).any()) for part in target) else 0.0
    if base is None:
        return error_left([piece], mix, norm, stop_at=limit)
    error = math.hypot(
        *(
            float(torch.linalg.vector_norm(base.fetch(box) - mix.fetch(box)))
            for box in parts_of(piece)
        )
    )
    return error / norm


def _nearby(weight: float, tolerance: float) -> float:
    """Return the whole number that ``weight`` is to within ``tolerance``, else itself."""
    whole = float(round(weight))
    return whole if abs(weight - whole) <= 10 * tolerance else weight


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(abs(x - y) <= 1e-6 * max(abs(x), abs(y), 1e-6) for x, y in zip(a, b, strict=True))
