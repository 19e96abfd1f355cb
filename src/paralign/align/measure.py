"""Measure how far one side's tensor is from the other's, reading both in parts.

All sums are taken in fp64. At most a few parts of :data:`PART_ELEMENTS` elements are in memory at a
time, however large the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paralign.align.pair import Piece, Quantity
from paralign.align.payload import Scratch
from paralign.layout import Box, boxes

PART_ELEMENTS = 1 << 17
"""Elements compared at once: 1 MiB per operand, which stays in the cache."""

_CLOSE, _LARGE = 0.1, 1e140

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
        if other.worst_index is not None and (
            self.worst_index is None or _larger(other.worst, self.worst)
        ):
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
    other: Distance | None = None
    """Error and base of the other quantity that was measured beside it; no more of it."""


def measure(
    side: Quantity, base: Quantity, *, other: Quantity | None = None, factor: float = 1.0
) -> Measured:
    """Measure every piece of ``side`` against ``base``; both must hold their tensor completely.

    Args:
        side: The quantity to measure; all its replicas are.
        base: What to measure it against; one replica of it is read.
        other: A second quantity to measure, which then does not read the base again; one replica.
        factor: Multiplies the base first, to test "it is this factor off".
    """
    result = Measured(other=None if other is None else Distance())
    scratch = Scratch()
    for pieces in side.replicas.values():
        per_piece = [Distance() for _ in pieces]
        for box, r, beside, values in _read(pieces, base, other):
            if factor != 1.0:
                r = r * factor
            if beside is not None and result.other is not None:
                memory = scratch.take(torch.float64, r.numel()).view(box.shape)
                error = _norm(torch.sub(beside, r, out=memory))
                result.other.error = math.hypot(result.other.error, error)
                result.other.base = math.hypot(result.other.base, _norm(r))
            first = values[0]
            distance = compare_parts(first, r, box, per_piece[0].worst, scratch)
            per_piece[0].add(distance)
            for x, total in zip(values[1:], per_piece[1:], strict=True):
                if torch.equal(x, first):
                    total.add(distance)
                else:
                    result.replicas_differ = True
                    total.add(compare_parts(x, r, box, total.worst))
        for piece, distance in zip(pieces, per_piece, strict=True):
            result.by_rank.setdefault(piece.rank, Distance()).add(distance)
        result.total.add(max(per_piece, key=_badness))
    return result


Parts = tuple[Box, Tensor, Tensor | None, list[Tensor]]
"""A box, what the base has there, what the other quantity has, and what each piece has."""


def _read(pieces: Sequence[Piece], base: Quantity, other: Quantity | None) -> Iterator[Parts]:
    """Read replicas and their base part by part, each into the memory of the one before."""
    memory = [Scratch() for _ in range(len(pieces) + 2)]
    for box in _parts(pieces[0]):
        yield (
            box,
            base.fetch(box, memory[0]),
            None if other is None else other.fetch(box, memory[1]),
            [piece.read(box, own) for piece, own in zip(pieces, memory[2:], strict=True)],
        )


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


def compare_parts(
    x: Tensor,
    r: Tensor,
    box: Box,
    worst_before: float = -1.0,
    scratch: Scratch | None = None,
) -> Distance:
    """Measure one part, given in fp64.

    Args:
        x: The side measured.
        r: Its base.
        box: Where the part lies in the global tensor.
        worst_before: The worst element so far: one that is no worse is not looked for.
        scratch: Memory for the difference.
    """
    if torch.equal(x, r):
        norm = _norm(r)
        zero = tuple(box.start)
        value = float(r.reshape(-1)[0])
        return Distance(x.numel(), 0.0, norm, norm, norm * norm, 0, 0, 0.0, zero, (value, value))
    flat_x, flat_r = x.reshape(-1), r.reshape(-1)
    memory = (scratch or Scratch()).take(torch.float64, x.numel())
    difference = torch.sub(flat_x, flat_r, out=memory)
    low, high = torch.aminmax(difference)  # NaN wins
    worst = max(-float(low), float(high))
    finite = math.isfinite(worst)
    error, base = _norm(difference), _norm(flat_r)
    if finite and error < _CLOSE * base < _LARGE:
        # x = r + d: what is left to add up is d times r.
        shared = float(torch.dot(flat_r, difference))
        dot = base * base + shared
        size = math.sqrt(dot + shared + error * error)
    else:
        size, dot = _norm(flat_x), float(torch.dot(flat_x, flat_r))
    distance = Distance(x.numel(), error, base, size, dot, worst=worst)
    if not finite:
        distance.worst = math.nan if math.isnan(float(low)) else worst
        distance.nonfinite = int((~torch.isfinite(difference)).sum())
    if not worst <= REPORTED_SHARE:
        limit = flat_r.abs() * REPORTED_SHARE + REPORTED_SHARE
        distance.beyond = x.numel() - int((difference.abs() <= limit).sum())
    if not worst <= worst_before:
        at = int(difference.abs().argmax())  # NaN wins here too
        index = zip(box.start, _unravel(at, box.shape), strict=True)
        distance.worst_index = tuple(first + step for first, step in index)
        distance.worst_values = float(flat_r[at]), float(flat_x[at])
    return distance


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
