"""How part of a stored tensor is seen as a box of another one: an offset and a stride per dim.

A slice of a fused weight, a head of an interleaved one, an expert of a stack, a transposed weight
and a run of elements of a flat buffer are all of this kind::

    stored [q0 k0 v0 q1 k1 v1], rows of 8     q's head 1 = rows 3:4 -> offset 24, strides (8, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paralign.layout import Box


@dataclass(frozen=True)
class Window:
    """Elements of a stored tensor, by position in row-major order: ``as_strided``'s arguments."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def reach(self) -> int:
        """Number of stored elements from the first to the last one seen."""
        if not self.numel:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def rows(self) -> tuple[int, Iterator[Window]]:
        """Cut along the dim whose steps are widest; return that dim and its parts."""
        dim = max(
            (dim for dim, n in enumerate(self.shape) if n > 1), key=lambda dim: self.strides[dim]
        )
        shape = (*self.shape[:dim], 1, *self.shape[dim + 1 :])
        step = self.strides[dim]
        return dim, (
            Window(self.offset + at * step, shape, self.strides) for at in range(self.shape[dim])
        )


@dataclass(frozen=True)
class Lens:
    """Where a box of a tensor lies in a stored one.

    Args:
        offset: Position of the box's first element in the stored tensor, in row-major order.
        strides: Step in the stored tensor per dim of the box; none is negative.
    """

    offset: int
    strides: tuple[int, ...]

    def window(self, box: Box) -> Window:
        """Return what ``box`` sees, whose ``local`` is relative to the lens."""
        return Window(self.shifted(box.local).offset, box.shape, self.strides)

    def shifted(self, index: Sequence[int]) -> Lens:
        """Return the lens of a box that begins at ``index`` of this one's."""
        shift = sum(at * stride for at, stride in zip(index, self.strides, strict=True))
        return Lens(self.offset + shift, self.strides)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def position(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the place of an element in row-major order."""
    return sum(at * stride for at, stride in zip(index, row_major(shape), strict=True))
