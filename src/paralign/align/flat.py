"""A range of a tensor's elements in row-major order, as boxes: what ZeRO and FSDP1 cut out.

Elements 3:14 of a [4, 5] tensor are the end of row 0, all of row 1 and the start of row 2::

    . . . a a
    b b b b b      three boxes: a, b, c
    c c c c .
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paralign.layout import Interval, LocalMap, Span


class FlatBox(NamedTuple):
    """One box of a flat range."""

    offset: int
    """Where it begins in the range."""
    intervals: tuple[Interval, ...]
    """What it is of the tensor, per dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in self.intervals)

    @property
    def map(self) -> LocalMap:
        """The box as a piece of its own."""
        return tuple((Span((0, stop - start), (start, stop)),) for start, stop in self.intervals)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[FlatBox]:
    """Yield the boxes that elements ``start`` to ``stop`` of a tensor of ``shape`` make up."""
    if start >= stop:
        return
    if not shape:
        yield FlatBox(0, ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        for box in flat_boxes(shape[1:], start - first * row, stop - first * row):
            yield FlatBox(box.offset, ((first, first + 1), *box.intervals))
        return
    at = start
    if start % row:
        yield from flat_boxes(shape, start, (first + 1) * row)
        at = (first + 1) * row
    whole_rows = stop // row
    if at < whole_rows * row:
        rest = tuple((0, size) for size in shape[1:])
        yield FlatBox(at - start, ((at // row, whole_rows), *rest))
        at = whole_rows * row
    if at < stop:
        for box in flat_boxes(shape, at, stop):
            yield FlatBox(at - start + box.offset, box.intervals)
