"""Which part of a global tensor a rank holds: intervals and boxes, computed without torch.

A rank's piece is described per tensor dim, as the intervals it holds in local order. ``[10, 4]``,
cut into two parts (tp) and each of these over two ranks (fsdp), on fsdp rank 0::

    local rows   0 1 2   3 4 5        map of dim 0: (local 0:3 = global 0:3), (local 3:6 = global
    5:8)
    global rows  0 1 2   5 6 7        map of dim 1: (local 0:4 = global 0:4)

The piece is the product of its dims' intervals: here two boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paralign.errors import LayoutError

Interval = tuple[int, int]
"""Half-open: ``(start, stop)``."""


class Span(NamedTuple):
    """Where one interval of a local dim lies in the global dim; both have the same length."""

    local: Interval
    global_: Interval


LocalMap = tuple[tuple[Span, ...], ...]
"""Per tensor dim, the spans held, in local order. A dim without spans is held by nobody here."""


@dataclass(frozen=True)
class Box:
    """One rectangular part of a tensor: where it starts locally and globally, and its shape."""

    local: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The slices that cut this box out of the local tensor."""
        return tuple(slice(at, at + n) for at, n in zip(self.local, self.shape, strict=True))

    def intersect(self, other: Box) -> tuple[Box, Box] | None:
        """Return the part held by both, as a box of ``self`` and one of ``other``; None if none."""
        starts = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stops = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True)
        )
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        if any(n <= 0 for n in shape):
            return None
        return self._part(starts, shape), other._part(starts, shape)

    def split(self, max_elements: int) -> Iterator[Box]:
        """Cut into boxes of at most ``max_elements``, in row-major order."""
        if self.numel <= max_elements:
            yield self
            return
        # The first dim whose rows are small enough is cut into runs of rows, dims before it one by
        # one.
        rows = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        dim = next(dim for dim, row in enumerate(rows) if row <= max_elements)
        step = max(1, max_elements // rows[dim])
        outer = itertools.product(*(range(n) for n in self.shape[:dim]))
        for indices in outer:
            for first in range(0, self.shape[dim], step):
                shift = (*indices, first, *(0 for _ in self.shape[dim + 1 :]))
                length = min(step, self.shape[dim] - first)
                shape = (*(1 for _ in indices), length, *self.shape[dim + 1 :])
                yield self._part(
                    tuple(a + b for a, b in zip(self.start, shift, strict=True)), shape
                )

    def _part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        local = tuple(
            at + inner - outer
            for at, inner, outer in zip(self.local, start, self.start, strict=True)
        )
        return Box(local, start, shape)


@dataclass(frozen=True)
class Part:
    """What each rank of one mesh axis holds of a tensor that its ranks share.

    Attributes:
        dim: The dim of which a rank holds an equal, contiguous part; None: it holds all of it.
        num_parts: Parts of that dim, where there are fewer than ranks: neighbours hold the same
            one. None: one for each rank.
        is_sum: Ranks that hold the same part hold summands of it.
    """

    dim: int | None = None
    num_parts: int | None = None
    is_sum: bool = False


def whole(shape: Sequence[int]) -> LocalMap:
    """Return the map of a rank that holds all of a tensor of ``shape``."""
    return tuple((Span((0, size), (0, size)),) if size else () for size in shape)


def local_boxes(
    global_shape: Sequence[int],
    placements: Sequence[Any],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    *,
    held_shape: Sequence[int] | None = None,
) -> LocalMap:
    """Return what the rank at ``coordinate`` of a mesh holds of a DTensor with ``placements``.

    Placements act from the first mesh axis to the last. ``Shard`` cuts like ``torch.chunk``: pieces
    of equal, rounded-up size, the last ones smaller or empty. ``_StridedShard`` first cuts into its
    ``split_factor`` parts and takes one piece of each. ``Replicate`` and ``Partial`` cut nothing.

    Args:
        global_shape: Shape of the logical tensor.
        placements: One per mesh axis; read by attribute (``dim``, ``split_factor``), not by class,
            so that other libraries' placements work too.
        mesh_shape: Size of every mesh axis.
        coordinate: Index of the rank on every mesh axis.
        held_shape: Shape of the local tensor, where there is one. ``fully_shard`` over tp stores
            its shards tp first, which in uneven splits is not what its ``_StridedShard`` says; the
            shape really held decides, see [Note: strided order].

    Raises:
        LayoutError: Lengths differ, a placement names a dim that the tensor lacks, or no order of
            the axes gives ``held_shape``.
    """
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise LayoutError(
            f"placements={tuple(placements)} has {len(placements)} entries for a mesh of shape "
            f"{tuple(mesh_shape)} and coordinate {tuple(coordinate)}. Give one per mesh axis."
        )
    cuts = [
        _Cut(dim, int(getattr(placement, "split_factor", 1)), degree, index)
        for placement, degree, index in zip(placements, mesh_shape, coordinate, strict=True)
        if (dim := shard_dim(placement, len(global_shape))) is not None
    ]
    if held_shape is None:
        return _apply(global_shape, cuts)
    # [Note: strided order]
    # Rows 9 over tp=2, each part over fsdp=4: tp rank 1 holds 4 rows and gives one to each fsdp
    # rank. Read from left to right, (_StridedShard(0, 2), Shard(0)) gives fsdp rank 3 the rows
    # (none of part 0, one of part 1) and chunks this one row over tp: it lands on tp rank 0. In
    # even splits both orders agree. fully_shard's is tried first because that is where strided
    # shards come from.
    candidates = [_apply(global_shape, order) for order in (_inner_first(cuts), cuts)]
    for candidate in candidates:
        if local_shape(candidate) == tuple(held_shape):
            return candidate
    raise LayoutError(
        f"held_shape={tuple(held_shape)} is not what placements={tuple(placements)} give at "
        f"coordinate {tuple(coordinate)} of a mesh of shape {tuple(mesh_shape)} for a tensor of "
        f"shape {tuple(global_shape)}: {local_shape(candidates[-1])}. The local tensor was padded "
        "or resized; record the tensor before that."
    )


class _Cut(NamedTuple):
    """One axis that cuts a dim."""

    dim: int
    split_factor: int
    degree: int
    at: int


def _inner_first(cuts: Sequence[_Cut]) -> list[_Cut]:
    """Undo striding: an axis whose ``split_factor`` is the degree of all later ones comes last."""
    order: list[_Cut] = []
    for position in range(len(cuts) - 1, -1, -1):
        cut = cuts[position]
        later = math.prod(other.degree for other in cuts[position + 1 :] if other.dim == cut.dim)
        if cut.split_factor > 1 and cut.split_factor == later:
            order.append(cut._replace(split_factor=1))
        else:
            order.insert(0, cut)
    return order


def _apply(global_shape: Sequence[int], cuts: Sequence[_Cut]) -> LocalMap:
    held: list[list[Interval]] = [[(0, size)] if size else [] for size in global_shape]
    for dim, parts, degree, index in cuts:
        held[dim] = [
            interval
            for part in range(parts)
            for interval in _chunk(_chunk(held[dim], parts, part), degree, index)
        ]
    return tuple(_spans(intervals) for intervals in held)


def shard_dim(placement: Any, num_dims: int) -> int | None:
    """Return the tensor dim that ``placement`` cuts, or None if it cuts none.

    Raises:
        LayoutError: The tensor has no such dim, or this kind of placement is not known.
    """
    if is_partial(placement) or type(placement).__name__ == "Replicate":
        return None
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise LayoutError(
            f"placement={placement!r} is none of Shard, Replicate and Partial, so the part of the "
            "tensor that this rank holds is not known. Redistribute the tensor to one of these "
            "first."
        )
    if not -num_dims <= dim < num_dims:
        raise LayoutError(
            f"placement={placement!r} cuts dim {dim} of a tensor with {num_dims} dims. "
            f"Use a dim from 0 to {num_dims - 1}."
        )
    return dim % num_dims


def is_partial(placement: Any) -> bool:
    """Say whether the ranks of this axis hold summands of the tensor, not the tensor."""
    return hasattr(placement, "reduce_op")


def local_shape(local_map: LocalMap) -> tuple[int, ...]:
    """Return the shape of the local tensor that ``local_map`` describes."""
    return tuple(sum(span.local[1] - span.local[0] for span in spans) for spans in local_map)


def boxes(local_map: LocalMap) -> list[Box]:
    """Return the boxes of a piece: the product of its dims' spans. Empty if it holds nothing."""
    return [
        Box(
            local=tuple(span.local[0] for span in spans),
            start=tuple(span.global_[0] for span in spans),
            shape=tuple(span.local[1] - span.local[0] for span in spans),
        )
        for spans in itertools.product(*local_map)
    ]


def overlap_elements(parts: Sequence[Box]) -> int:
    """Return how many elements are held by two of ``parts``, counted once per pair."""
    if not parts or not parts[0].shape:
        return max(0, len(parts) * (len(parts) - 1) // 2)
    # Sorted by their first row, a box can only meet the following ones that start before it ends.
    ordered = sorted(parts, key=lambda box: box.start[0])
    total = 0
    for i, box in enumerate(ordered):
        for other in itertools.islice(ordered, i + 1, None):
            if other.start[0] >= box.start[0] + box.shape[0]:
                break
            if both := box.intersect(other):
                total += both[0].numel
    return total


def _chunk(intervals: Sequence[Interval], parts: int, index: int) -> list[Interval]:
    """Return chunk ``index`` of ``parts`` of a dim that consists of ``intervals``."""
    length = sum(stop - start for start, stop in intervals)
    size = -(-length // parts)
    first, last = min(index * size, length), min((index + 1) * size, length)
    chunk, at = [], 0
    for start, stop in intervals:
        left, right = max(first, at), min(last, at + stop - start)
        if left < right:
            chunk.append((start + left - at, start + right - at))
        at += stop - start
    return chunk


def _spans(intervals: Sequence[Interval]) -> tuple[Span, ...]:
    """Join neighbouring intervals and number them locally."""
    spans: list[Span] = []
    at = 0
    for start, stop in intervals:
        if spans and spans[-1].global_[1] == start:
            last = spans.pop()
            spans.append(Span((last.local[0], at + stop - start), (last.global_[0], stop)))
        else:
            spans.append(Span((at, at + stop - start), (start, stop)))
        at += stop - start
    return tuple(spans)
