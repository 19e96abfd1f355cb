"""The weights of a run at its start, on the way to their places in the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paralign.align.content import Match
from paralign.align.lens import Lens
from paralign.align.places import own_name
from paralign.align.trace import TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box

_CHUNK = 1 << 18


@dataclass
class Item:
    """A weight of a rank on its way to its place."""

    rank: int
    entry: TensorEntry
    claimed: str
    """The name it was recorded under, or the rule gave it."""
    is_equal: bool = False
    """The reference has the same values there."""
    number: int | None = None
    """Global number of its layer, where its stage counts for itself."""
    match: Match = field(default_factory=Match)

    @property
    def own(self) -> str:
        """Its name in its module."""
        return own_name(self.entry)

    @property
    def key(self) -> tuple[int, str]:
        """What tells it apart."""
        return self.rank, self.own

    @property
    def can_be_searched(self) -> bool:
        """Whether its values can be looked at by lines."""
        entry = self.entry
        return (
            entry.file is not None
            and entry.flat is None
            and not entry.partial_over
            and 0 not in entry.held_shape
            and is_readable(entry)
        )


def is_readable(entry: TensorEntry) -> bool:
    """Whether its dtype has the arithmetic that hashing needs: floats of two bytes and more."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return dtype.is_floating_point and dtype.itemsize > 1


class StartValues:
    """Looks at single values of weights.

    Args:
        reader: The run.
    """

    def __init__(self, reader: TraceReader) -> None:
        self._reader = reader
        self._constant: dict[tuple[int, str], bool] = {}

    def are_constant(self, item: Item) -> bool:
        """Whether all elements are the same: then they say nothing of what it is."""
        if item.key not in self._constant:
            self._constant[item.key] = self._has_one_value(item.entry)
        return self._constant[item.key]

    def begin_alike(self, item: Item, other: Item) -> bool:
        """Whether the first elements are the same."""
        if item.entry.file is None or other.entry.file is None:
            return False
        if 0 in item.entry.held_shape or 0 in other.entry.held_shape:
            return item.entry.held_shape == other.entry.held_shape
        first, second = (self._read(entry, 0, 1) for entry in (item.entry, other.entry))
        return bool((first == second).all())

    def _has_one_value(self, entry: TensorEntry) -> bool:
        if entry.file is None or 0 in entry.held_shape:
            return True
        count = math.prod(entry.held_shape)
        value = self._read(entry, 0, 1)
        return all(
            bool((self._read(entry, first, min(_CHUNK, count - first)) == value).all())
            for first in range(0, count, _CHUNK)
        )

    def _read(self, entry: TensorEntry, first: int, count: int) -> Tensor:
        return self._reader.read(entry, Box((first,), (first,), (count,)), Lens(0, (1,)))
