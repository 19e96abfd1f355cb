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
from paralign.layout import Box, boxes, local_shape

_SAMPLE = 2048
_MOST_CONTRIBUTIONS = 512
_INDEPENDENT = 1e-9
_MULTIPLE = 1e-12


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
        contributions = contributions_to(item, side)
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
    by_label = {contribution.label: contribution for contribution in contributions}
    limit = limit_of(item) or 0.0
    for recipe in context.recipes if by_label else []:
        if not set(recipe.labels) <= by_label.keys():
            continue
        # What the recipe leaves out added nothing to the tensor that taught it.
        if any(adds(one) for label, one in by_label.items() if label not in recipe.labels):
            continue
        contributions = [by_label[label] for label in recipe.labels]
        members = [[_Member(column, 1.0)] for column in range(len(contributions))]
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


def contributions_to(item: Compared, side: Side) -> list[Contribution]:
    """Return what ranks and micro-batches of a run had for a tensor before any reduction."""
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


def adds(contribution: Contribution) -> bool:
    """Whether it is not zero, as that of a micro-batch without a valid token is."""
    return any(bool(contribution.piece.read(box).any()) for box in parts_of(contribution.piece))


def _recipe_of(item: Compared, contributions: Sequence[Contribution]) -> Recipe | None:
    """Solve for the weights: the right ones on all parts at once, then on each what was made.

    On a single part two contributions may be multiples of each other; what it does not determine
    is taken as right.
    """
    contributions = [c for c in contributions if adds(c)]
    if not 1 < len(contributions) <= _MOST_CONTRIBUTIONS:
        return None
    parts = [
        _Part(pieces, _sample(pieces[0], contributions))
        for pieces in item.side.replicas.values()
        if local_shape(pieces[0].map) and 0 not in local_shape(pieces[0].map)
    ]
    if not parts:
        return None
    columns, members = _distinct(torch.cat([part.columns for part in parts]))
    if columns.shape[0] < columns.shape[1]:
        return None
    if torch.linalg.matrix_rank(columns, rtol=_INDEPENDENT) < columns.shape[1]:
        return None
    limit = limit_of(item) or 0.0
    target = torch.cat([_values(item.base, part.pieces[0]) for part in parts])
    right = _least_squares(columns, target, limit)
    made: dict[int, tuple[float, ...]] = {}
    worst = 0.0
    for part in parts:
        own = part.columns[:, [group[0].index for group in members]]
        here = _error(part.pieces[0], item.base, right, members, contributions, limit)
        worst = max(worst, here)
        for piece in part.pieces:
            if not worst <= limit:
                return None
            found = _least_squares(own, _values(piece, piece), limit, near=right)
            worst = max(worst, _error(piece, None, found, members, contributions, limit))
            made[piece.rank] = _spread(found, members, len(contributions))
    if not worst <= limit:
        return None
    labels = tuple(contribution.label for contribution in contributions)
    shared = frozenset(labels[index] for index in _shared(members))
    return Recipe(labels, _spread(right, members, len(contributions)), made, worst, shared)


@dataclass(frozen=True)
class _Part:
    """A distinct part of a tensor: its copies, and a sample of what each contribution adds."""

    pieces: Sequence[Piece]
    columns: Tensor


def _sampled(piece: Held) -> list[Box]:
    return [box for part in parts_of(piece) for box in part.split(_SAMPLE)][:4]


def _sample(piece: Held, contributions: Sequence[Contribution]) -> Tensor:
    boxes_ = _sampled(piece)
    return torch.stack(
        [torch.cat([c.fetch(box).reshape(-1) for box in boxes_]) for c in contributions], dim=1
    )


def _values(source: Readable | Held, piece: Held) -> Tensor:
    """Return the sample of ``piece``'s part in another tensor, or in itself."""
    read = source.fetch if hasattr(source, "fetch") else source.read
    return torch.cat([read(box).reshape(-1) for box in _sampled(piece)])


def _least_squares(
    columns: Tensor, target: Tensor, limit: float, *, near: Sequence[float] | None = None
) -> list[float]:
    """Return the weights of the columns; of several sets of them the one next to ``near``."""
    base = torch.zeros(columns.shape[1], dtype=torch.float64)
    if near is not None:
        base = torch.tensor(near, dtype=torch.float64)
    rest = (target - columns @ base)[:, None]
    step = torch.linalg.lstsq(columns, rest, rcond=_INDEPENDENT, driver="gelsd").solution[:, 0]
    # What a low-precision run cannot resolve is no weight: whole numbers are meant.
    return [_nearby(float(w), max(limit, 1e-9)) for w in base + step]


@dataclass(frozen=True)
class _Member:
    """A contribution as a multiple of its column."""

    index: int
    ratio: float


def _distinct(columns: Tensor) -> tuple[Tensor, list[list[_Member]]]:
    """Join contributions that are multiples of each other into one column each.

    Ranks that compute the same are equal; micro-batches of one and the same token may be multiples.
    """
    members: list[list[_Member]] = []
    products = columns.T @ columns  # all at once: most pairs are far from multiples
    squares = products.diag()
    may_be = products.square() >= 0.99 * torch.outer(squares, squares)
    for column in range(columns.shape[1]):
        for group in members:
            if not may_be[group[0].index, column]:
                continue
            ratio = _ratio(columns[:, group[0].index], columns[:, column])
            if ratio is not None:
                group.append(_Member(column, ratio))
                break
        else:
            members.append([_Member(column, 1.0)])
    return columns[:, [group[0].index for group in members]], members


def _ratio(base: Tensor, other: Tensor) -> float | None:
    """Return what ``base`` is to be multiplied by to give ``other``; None if nothing does."""
    if torch.equal(base, other):
        return 1.0
    square = float(base @ base)
    ratio = float(base @ other) / square if square else 0.0
    left = float(torch.linalg.vector_norm(other - ratio * base))
    return ratio if left <= _MULTIPLE * float(torch.linalg.vector_norm(other)) else None


def _spread(
    weights: Sequence[float], members: Sequence[Sequence[_Member]], total: int
) -> tuple[float, ...]:
    """Give every contribution its share of its column's weight."""
    result = [0.0] * total
    for weight, group in zip(weights, members, strict=True):
        whole = sum(member.ratio for member in group)
        if abs(whole) <= _MULTIPLE:  # they cancel: together they have no weight to share
            result[group[0].index] = weight
            continue
        for member in group:
            result[member.index] = weight / whole
    return tuple(result)


def _shared(members: Sequence[Sequence[_Member]]) -> list[int]:
    """Return the contributions whose own weight is not known, but only that of several together.

    Where all have twins, ranks compute the same by design, and the twins share evenly.
    """
    least = min(len(group) for group in members)
    return [member.index for group in members if len(group) > least for member in group]


def _error(
    piece: Held,
    base: Readable | None,
    weights: Sequence[float],
    members: Sequence[Sequence[_Member]],
    contributions: Sequence[Contribution],
    limit: float,
) -> float:
    """Return the error of a set of weights on all of ``piece``'s part."""
    terms = [
        (weight, contributions[group[0].index])
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
