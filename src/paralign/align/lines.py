"""Hashes of a tensor's lines: its rows and columns, and segments of them as a shard would hold.

A tensor is looked at as a stack of matrices, ``[slices, rows, columns]``; the dims of a
convolution's kernel are one. A *line* is a row or a column of one matrix. Two equal lines have
equal hashes wherever they are, so a weight is found again in a fused, stacked, sharded or
transposed one without a name. What is kept is 8 bytes per line, never the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.measure import PART_ELEMENTS

ROWS, COLUMNS = "rows", "columns"
SHORTEST = 4
"""Lines with fewer elements say too little."""

ReadRows = Callable[[int, int], Tensor]
"""Rows ``first`` to ``last`` of the stack, ``[last - first, columns]``."""


@dataclass(frozen=True)
class Stack:
    """A shape, seen as a stack of matrices."""

    shape: tuple[int, ...]

    @property
    def merged(self) -> int:
        """Number of trailing dims that make up a row: those of a kernel, else the last one."""
        if len(self.shape) > 3:
            return len(self.shape) - 2
        if len(self.shape) == 3 and self.shape[-1] < SHORTEST:
            return 2
        return min(1, len(self.shape))

    @property
    def lead(self) -> tuple[int, ...]:
        """The dims that count rows."""
        return self.shape[: len(self.shape) - self.merged]

    @property
    def columns(self) -> int:
        """Length of a row."""
        return math.prod(self.shape[len(self.shape) - self.merged :])

    @property
    def rows(self) -> int:
        """Rows of one matrix."""
        return self.lead[-1] if self.lead else 1

    @property
    def slices(self) -> int:
        """Number of matrices."""
        return math.prod(self.lead[:-1])

    def length(self, way: str) -> int:
        """Return the length of a whole line."""
        return self.columns if way == ROWS else self.rows

    def count(self, way: str) -> int:
        """Return the number of lines."""
        return self.slices * (self.rows if way == ROWS else self.columns)


def offsets(whole: int, length: int) -> list[int]:
    """Return where a shard of ``length`` may begin in a line: after whole shards, or at its end."""
    starts = list(range(0, whole - length + 1, length))
    return starts if whole % length == 0 else [*starts, whole - length]


def line_hashes(
    stack: Stack, read: ReadRows, wanted: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Tensor]:
    """Hash the lines of a tensor in one pass over it.

    Args:
        stack: Its shape.
        read: Gives its rows, part by part.
        wanted: ``(rows or columns, length)``; every line is cut into segments of that length.

    Returns:
        Per wanted pair ``[lines, segments]``; segments begin at :func:`offsets`.
    """
    found: dict[tuple[str, int], Tensor] = {}
    for way, length in wanted:
        segments = len(offsets(stack.length(way), length))
        found[way, length] = torch.zeros(stack.count(way), segments, dtype=torch.int64)
    for first, last, numbers in _chunks(stack):
        bits = _bits(read(first, last))
        for (way, length), hashes in found.items():
            if way == ROWS:
                hashes[first:last] = _row_segments(bits, length)
            else:
                begin = first // stack.rows
                block = bits.view(-1, len(numbers), stack.columns)
                view = hashes.view(stack.slices, stack.columns, -1)
                view[begin : begin + len(block)] += _column_segments(
                    block, numbers, stack.rows, length
                )
    return found


def _chunks(stack: Stack) -> Iterator[tuple[int, int, range]]:
    """Yield rows of the stack and their numbers in their matrix: whole ones, or parts of one."""
    at_once = max(1, PART_ELEMENTS // max(stack.columns, 1))
    if stack.rows <= at_once:
        step = max(1, at_once // max(stack.rows, 1))
        for begin in range(0, stack.slices, step):
            end = min(begin + step, stack.slices)
            yield begin * stack.rows, end * stack.rows, range(stack.rows)
        return
    for begin in range(stack.slices):
        for row in range(0, stack.rows, at_once):
            stop = min(row + at_once, stack.rows)
            yield begin * stack.rows + row, begin * stack.rows + stop, range(row, stop)


def _row_segments(bits: Tensor, length: int) -> Tensor:
    whole = bits.shape[1]
    weights = _weights(length)
    full = whole // length
    hashes = (bits[:, : full * length].view(-1, full, length) * weights).sum(dim=2)
    if whole % length:
        hashes = torch.cat([hashes, (bits[:, whole - length :] * weights).sum(1, True)], dim=1)
    return hashes


def _column_segments(block: Tensor, numbers: range, whole: int, length: int) -> Tensor:
    """Add up what these rows are of each column's segments: ``[slices, columns, segments]``."""
    weights = _weights(length)
    rows = torch.arange(numbers.start, numbers.stop)
    full = whole // length
    segments = len(offsets(whole, length))
    sums = torch.zeros(block.shape[0], segments, block.shape[2], dtype=torch.int64)
    inside = rows[rows < full * length]
    if len(inside):
        part = block[:, : len(inside)] * weights[inside % length].view(1, -1, 1)
        sums.index_add_(1, inside // length, part)
    tail = rows[rows >= whole - length]
    if whole % length and len(tail):
        part = block[:, len(rows) - len(tail) :] * weights[tail - (whole - length)].view(1, -1, 1)
        sums[:, -1] += part.sum(dim=1)
    return sums.transpose(1, 2)


def _weights(length: int) -> Tensor:
    """Return a fixed, odd, random number per place in a line."""
    generator = torch.Generator().manual_seed(0x5EED)
    low = torch.iinfo(torch.int64).min
    high = torch.iinfo(torch.int64).max
    return torch.randint(low, high, (length,), generator=generator, dtype=torch.int64) | 1


def _bits(values: Tensor) -> Tensor:
    """Return the bit patterns as whole numbers; both zeros have the same."""
    values = values + 0.0 if values.is_floating_point() else values.to(torch.int64)
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(kinds[values.element_size()]).to(torch.int64)
