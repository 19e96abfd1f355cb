"""Tensors under other names and in other parts: ours from published ones, and the other way round.

Nothing is held: a part of a tensor is read from the parts that it is made of when it is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import torch
from torch import Tensor

from paralign.align.weights import Weights
from paralign.layout import Box
from paralign.models.published import Layout, Part, Placed


class Translated:
    """``source``, as the other side of a layout has it.

    Args:
        source: Tensors of one side.
        layout: What both sides have in common.
        to: The side that is read here.
    """

    def __init__(self, source: Weights, layout: Layout, *, to: Literal["ours", "theirs"]) -> None:
        self.where = source.where
        self._source, self._layout, self._to = source, layout, to
        self.shapes: Mapping[str, tuple[int, ...]] = layout.ours if to == "ours" else layout.theirs

    def choose(self, names: Collection[str]) -> Weights:
        """Return these weights."""
        return self

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, in the dtype its own parts are stored in."""
        by_name = self._layout.by_ours if self._to == "ours" else self._layout.by_theirs
        found: list[tuple[tuple[slice, ...], Tensor]] = []
        for part in by_name[name]:
            here, there = (part.ours, part.theirs)
            if self._to == "theirs":
                here, there = there, here
            region = _region(part, here, box)
            if region is not None:
                found.append((_slices(part, here, box, region), self._values(part, there, region)))
        if len(found) == 1 and found[0][1].numel() == box.numel:
            return found[0][1].reshape(box.shape)
        dtype = found[0][1].dtype
        for _, values in found:
            dtype = torch.promote_types(dtype, values.dtype)
        target = torch.empty(box.shape, dtype=dtype)
        for slices, values in found:
            target[slices] = values.reshape(target[slices].shape)
        return target

    def close(self) -> None:
        """Let go of the source."""
        self._source.close()

    def _values(self, part: Part, there: Placed, region: _Region) -> Tensor:
        """Return a region of a part, in the order of rows that it has on this side."""
        start, stop = region
        if there.name in self._layout.zeros:
            return torch.zeros([b - a for a, b in zip(start, stop, strict=True)])
        rows = self._rows(part, start[0], stop[0])
        if rows is not None:
            start, stop = (min(rows), *start[1:]), (max(rows) + 1, *stop[1:])
        extra = len(there.start) - len(start)
        at = tuple(a + b for a, b in zip(there.start, (*(0,) * extra, *start), strict=True))
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        box = Box((0,) * len(at), at, (*(1,) * extra, *size))
        values = self._source.read(there.name, box).reshape(size)
        if rows is None:
            return values
        return values.index_select(0, torch.tensor([row - start[0] for row in rows]))

    def _rows(self, part: Part, first: int, stop: int) -> list[int] | None:
        """Return which rows of the other side rows ``first`` to ``stop`` of this one are."""
        if part.order is None:
            return None
        order = part.order
        if self._to == "theirs":
            order = tuple(sorted(range(len(order)), key=order.__getitem__))
        return list(order[first:stop])


_Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop inside a part, in its own dims."""


def _region(part: Part, here: Placed, box: Box) -> _Region | None:
    """Return what a part and ``box`` of the tensor have in common; None if nothing."""
    extra = len(here.start) - len(part.shape)
    whole = (*(1,) * extra, *part.shape)
    pairs = list(zip(here.start, whole, box.start, box.shape, strict=True))
    start = tuple(max(b - a, 0) for a, _, b, _ in pairs)
    stop = tuple(min(b + m - a, n) for a, n, b, m in pairs)
    if any(a >= b for a, b in zip(start, stop, strict=True)):
        return None
    return start[extra:], stop[extra:]


def _slices(part: Part, here: Placed, box: Box, region: _Region) -> tuple[slice, ...]:
    """Return where a region of a part lies in ``box``."""
    extra = len(here.start) - len(part.shape)
    start, stop = (*(0,) * extra, *region[0]), (*(1,) * extra, *region[1])
    shift = [a - b for a, b in zip(here.start, box.start, strict=True)]
    return tuple(slice(a + d, b + d) for a, b, d in zip(start, stop, shift, strict=True))
