"""Measure how far one side's tensor is from the other's, reading both in parts.

All sums are taken in fp64. At most a few parts of :data:`PART_ELEMENTS` elements are in memory at a
time, however large the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paralign.align.pair import Piece, Quantity
from paralign.layout import Box, boxes

PART_ELEMENTS = 1 << 18
"""Elements compared at once: 2 MiB per operand, which stays in the cache."""

REPORTED_SHARE = 2e-3
"""``allclose`` with this would refuse elements with ``|d| > 2e-3 + 2e-3 * |reference|``."""


@dataclass
class Distance:
    """Sums over the elements of a tensor, of the side measured (``x``) and its base (``r``).

    Norms are added up with ``hypot``, so that squares neither underflow nor overflow.
    """

    elements: int = 0
    error: float = 0.0
    """Frobenius norm of ``x - r``."""
    base: float = 0.0
    """Frobenius norm of ``r``."""
    size: float = 0.0
    """Frobenius norm of ``x``."""
    dot: float = 0.0
    nonfinite: int = 0
    beyond: int = 0
    worst: float = -1.0
    """Largest ``|x - r|``; NaN counts as larger than any number."""
    worst_index: tuple[int, ...] | None = None
    worst_values: tuple[float, float] | None = None
    """The base's value there, and the measured side's."""

    @property
    def relative(self) -> float:
        """``|x - r| / |r|``; 0/0 is 0, x/0 is infinite."""
        if self.nonfinite or math.isnan(self.error):
            return math.nan
        if self.base == 0.0:
            return 0.0 if self.error == 0.0 else math.inf
        return self.error / self.base

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between both; None where it has no meaning."""
        product = self.base * self.size
        if self.nonfinite or product == 0.0 or not math.isfinite(product):
            return None
        return max(-1.0, min(1.0, self.dot / product))

    @property
    def scale(self) -> float | None:
        """The factor that brings ``r`` closest to ``x``; None where it has no meaning."""
        if self.nonfinite or self.base == 0.0 or not math.isfinite(self.base):
            return None
        return self.dot / self.base / self.base

    def add(self, other: Distance) -> None:
        """Take in the elements of another part."""
        self.elements += other.elements
        self.error = math.hypot(self.error, other.error)
        self.base = math.hypot(self.base, other.base)
        self.size = math.hypot(self.size, other.size)
        self.dot += other.dot
        self.nonfinite += other.nonfinite
        self.beyond += other.beyond
        if self.worst_index is None or _larger(other.worst, self.worst):
            self.worst = other.worst
            self.worst_index = other.worst_index
            self.worst_values = other.worst_values


@dataclass
class Measured:
    """The distance of a tensor, and of what each rank holds of it."""

    total: Distance = field(default_factory=Distance)
    """Every element once: of replicas that differ, the part that is furthest off."""
    by_rank: dict[int, Distance] = field(default_factory=dict)
    replicas_differ: bool = False


def measure(side: Quantity, base: Quantity, *, factor: float = 1.0) -> Measured:
    """Measure every piece of ``side`` against ``base``; both must hold their tensor completely.

    Args:
        side: The quantity to measure; all its replicas are.
        base: What to measure it against; one replica of it is read.
        factor: Multiplies the base first, to test "it is this factor off".
    """
    result = Measured()
    for pieces in side.replicas.values():
        per_piece = [Distance() for _ in pieces]
        for box in _parts(pieces[0]):
            r = base.fetch(box)
            if factor != 1.0:
                r = r * factor
            first = pieces[0].read(box)
            distance = compare_parts(first, r, box)
            per_piece[0].add(distance)
            for piece, total in zip(pieces[1:], per_piece[1:], strict=True):
                x = piece.read(box)
                if torch.equal(x, first):
                    total.add(distance)
                else:
                    result.replicas_differ = True
                    total.add(compare_parts(x, r, box))
        for piece, distance in zip(pieces, per_piece, strict=True):
            result.by_rank.setdefault(piece.rank, Distance()).add(distance)
        result.total.add(max(per_piece, key=_badness))
    return result


def relative_distance(side: Quantity, base: Quantity) -> float:
    """Return how far ``side`` is from ``base``, relatively; of replicas one is read."""
    total = Distance()
    for pieces in side.replicas.values():
        for box in _parts(pieces[0]):
            r = base.fetch(box)
            total.error = math.hypot(total.error, _norm(pieces[0].read(box) - r))
            total.base = math.hypot(total.base, _norm(r))
    return total.relative


def are_bitwise_equal(side: Quantity, base: Quantity) -> bool:
    """Whether every piece of ``side`` has exactly the values of ``base``, in the narrower dtype."""
    return not unequal_pieces(side, base, first_only=True)


def unequal_pieces(side: Quantity, base: Quantity, *, first_only: bool = False) -> list[Piece]:
    """Return the pieces of ``side`` that differ from ``base`` in any value, in the narrower dtype.

    Args:
        side: The quantity whose pieces are looked at.
        base: What they should be equal to; it holds its tensor completely.
        first_only: Stop at the first one.
    """
    dtypes = {getattr(torch, q.pieces[0].terms[0].entry.dtype) for q in (side, base)}
    narrow = min(dtypes, key=lambda dtype: dtype.itemsize)
    unequal: list[Piece] = []
    for pieces in side.replicas.values():
        alike = list(pieces)
        for box in _parts(pieces[0]):
            r = base.fetch(box).to(narrow)
            still = [piece for piece in alike if torch.equal(piece.read(box).to(narrow), r)]
            unequal += [piece for piece in alike if piece not in still]
            alike = still
            if (unequal and first_only) or not alike:
                break
        if unequal and first_only:
            break
    return unequal


def count_unequal(side: Quantity, base: Quantity) -> Distance:
    """Count the elements of whole-number tensors that differ: ``error`` is how many do."""
    total = Distance()
    for pieces in side.replicas.values():
        for box in _parts(pieces[0]):
            r = base.fetch(box)
            values = [piece.read(box) for piece in pieces]
            differs = torch.stack([x != r for x in values])
            total.elements += r.numel()
            total.error += float(differs.any(dim=0).sum())
            if total.worst_index is None and bool(differs.any()):
                which, *index = (int(at) for at in differs.nonzero()[0])
                shifted = zip(box.start, index, strict=True)
                total.worst_index = tuple(first + at for first, at in shifted)
                total.worst_values = float(r[tuple(index)]), float(values[which][tuple(index)])
    return total


def compare_parts(x: Tensor, r: Tensor, box: Box) -> Distance:
    """Measure one part, given in fp64. ``box`` says where it lies in the global tensor."""
    if torch.equal(x, r):
        norm = _norm(r)
        zero = tuple(box.start)
        value = float(r.reshape(-1)[0])
        return Distance(x.numel(), 0.0, norm, norm, norm * norm, 0, 0, 0.0, zero, (value, value))
    difference = (x - r).reshape(-1)
    magnitude = difference.abs()
    worst, at = magnitude.max(dim=0)  # NaN wins
    finite = bool(torch.isfinite(magnitude.sum()))
    flat_x, flat_r = x.reshape(-1), r.reshape(-1)
    position = int(at)
    beyond = 0
    if not float(worst) <= REPORTED_SHARE:
        limit = flat_r.abs() * REPORTED_SHARE + REPORTED_SHARE
        beyond = x.numel() - int((magnitude <= limit).sum())
    return Distance(
        elements=x.numel(),
        error=_norm(difference),
        base=_norm(flat_r),
        size=_norm(flat_x),
        dot=float(torch.dot(flat_x, flat_r)),
        nonfinite=0 if finite else int((~torch.isfinite(difference)).sum()),
        beyond=beyond,
        worst=float(worst),
        worst_index=tuple(
            first + step
            for first, step in zip(box.start, _unravel(position, box.shape), strict=True)
        ),
        worst_values=(float(flat_r[position]), float(flat_x[position])),
    )


def parts_of(quantity: Quantity) -> Iterator[Box]:
    """Yield boxes of at most :data:`PART_ELEMENTS` elements that hold every element once."""
    for pieces in quantity.replicas.values():
        yield from _parts(pieces[0])


def _parts(piece: Piece) -> Iterator[Box]:
    for box in boxes(piece.map):
        yield from box.split(PART_ELEMENTS)


def _norm(x: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(x))
    if 1e-140 < norm < 1e140 or math.isnan(norm):
        return norm
    # The squares left the range of fp64: scale first.
    largest = float(x.abs().max())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(x / largest))


def _badness(distance: Distance) -> float:
    return math.inf if math.isnan(distance.error) or distance.nonfinite else distance.error


def _larger(a: float, b: float) -> bool:
    return not a <= b and not math.isnan(b)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, step = divmod(position, size)
        index.append(step)
    return tuple(reversed(index))
