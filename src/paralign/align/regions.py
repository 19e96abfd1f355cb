"""Parts of a tensor: what an entry of a trace holds of it, and boxes cut until none overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from paralign.align.flat import flat_boxes
from paralign.align.lens import Lens, position, row_major
from paralign.align.tensor_entry import TensorEntry
from paralign.layout import Box, LocalMap, Span, boxes, local_shape


def as_map(box: Box) -> LocalMap:
    """Return the map of a piece that is one box, held by itself."""
    return tuple(
        (Span((0, size), (start, start + size)),)
        for start, size in zip(box.start, box.shape, strict=True)
    )


def global_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape of the tensor, without padding."""
    return entry.shape if entry.true_shape is None else entry.true_shape


def held_parts(entry: TensorEntry) -> list[tuple[LocalMap, Lens | None]]:
    """Return what an entry holds of its tensor, without padding: maps, and how they are stored.

    One part whose map is the entry's own, or for a flat range one per box of it.
    """
    held = entry.map if entry.true_shape is None else clip(entry.map, entry.true_shape)
    if entry.flat is None:
        return [(held, None)]
    stored = local_shape(entry.map)
    parts: list[tuple[LocalMap, Lens | None]] = []
    for flat in flat_boxes(stored, *entry.flat):
        start = tuple(interval[0] for interval in flat.intervals)
        ranged = Box(start, start, flat.shape)
        for box in boxes(held):
            # Both in places of the local tensor; ``box.start`` tells where that is globally.
            both = ranged.intersect(Box(box.local, box.local, box.shape))
            if both is None:
                continue
            place = both[0].start
            offset = position(place, stored) - entry.flat[0]
            moved = zip(box.start, place, box.local, strict=True)
            target = Box(place, tuple(a + b - c for a, b, c in moved), both[0].shape)
            parts.append((as_map(target), Lens(offset, row_major(stored))))
    return parts


def clip(local_map: LocalMap, sizes: Sequence[int]) -> LocalMap:
    """Leave out what lies beyond ``sizes``: the padding of a tensor. Local places stay."""
    return tuple(
        tuple(
            Span((at, at + min(right, size) - left), (left, min(right, size)))
            for (at, _), (left, right) in spans
            if left < size
        )
        for spans, size in zip(local_map, sizes, strict=True)
    )


def apart(parts: Sequence[Box]) -> list[tuple[Box, ...]]:
    """Cut overlapping boxes until any two are equal or disjoint; per box, what it became.

    ``local`` of a part is relative to the box it was cut from.
    """
    cuts = [
        sorted(
            {edge for box in parts for edge in (box.start[dim], box.start[dim] + box.shape[dim])}
        )
        for dim in range(len(parts[0].shape) if parts else 0)
    ]
    return [tuple(_grid(box, cuts)) for box in parts]


def _grid(box: Box, cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    runs = []
    for first, size, edges in zip(box.start, box.shape, cuts, strict=True):
        inside = [first, *(edge for edge in edges if first < edge < first + size), first + size]
        runs.append(list(itertools.pairwise(inside)))
    for intervals in itertools.product(*runs):
        yield Box(
            tuple(a - first for (a, _), first in zip(intervals, box.start, strict=True)),
            tuple(a for a, _ in intervals),
            tuple(b - a for a, b in intervals),
        )
