"""A tensor of one kind at one step under one name, held in pieces by the ranks of one side.

Pieces with the same map are replicas of each other. Nothing is assembled: parts are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from paralign.align.lens import Lens
from paralign.align.payload import Scratch
from paralign.align.trace import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, LocalMap, boxes

UPDATE = "update"
"""Derived: the parameter after a step minus the parameter before it."""

KIND_ORDER = (
    Kind.INPUT,
    Kind.PARAM,
    Kind.OUTPUT,
    "tokens",
    "loss",
    Kind.OUTPUT_GRAD,
    Kind.MICRO_GRAD,
    Kind.GRAD,
    "norm",
    Kind.CLIPPED_GRAD,
    Kind.MOMENT,
    UPDATE,
    Kind.PARAM_AFTER,
)


@dataclass(frozen=True, order=True)
class Moment:
    """When and what: a kind of tensor at a step. Ordered as the run makes them."""

    step: int
    rank: int
    kind: str
    state: str = ""

    @classmethod
    def of(cls, step: int, kind: str, state: str | None = None) -> Moment:
        """Make one with its place in the order."""
        order = KIND_ORDER.index(kind) if kind in KIND_ORDER else len(KIND_ORDER)
        return cls(step, order, kind, state or "")

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.state}' if self.state else ''} of step {self.step}"


class Term(NamedTuple):
    """A summand of a piece."""

    weight: float
    entry: TensorEntry
    lens: Lens | None = None
    """How the entry's tensor is seen; None: as it is stored."""


@dataclass(frozen=True)
class Piece:
    """What one rank (or, for a pending sum, one group) holds of a quantity."""

    rank: int
    map: LocalMap
    terms: tuple[Term, ...]
    reader: TraceReader

    @property
    def identity(self) -> tuple[int, LocalMap, str, str | None, Lens | None]:
        """What is the same for the same piece at another moment."""
        first = self.terms[0]
        return self.rank, self.map, first.entry.name, first.entry.source, first.lens

    def read(self, box: Box, scratch: Scratch | None = None) -> Tensor:
        """Return the part ``box`` in fp64, in ``scratch`` where one is given."""
        if scratch is not None and len(self.terms) == 1 and self.terms[0].weight == 1.0:
            _, entry, lens = self.terms[0]
            stored = self.reader.read(entry, box, lens, scratch)
            if stored.dtype == torch.float64:
                return stored
            return scratch.take(torch.float64, stored.numel()).view(box.shape).copy_(stored)
        return weighted_sum(
            (weight, self.reader.read(entry, box, lens).to(torch.float64))
            for weight, entry, lens in self.terms
        )


@dataclass(frozen=True)
class Quantity:
    """All pieces of one tensor on one side."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    problems: tuple[str, ...]
    """Why the pieces do not hold the tensor completely, if they do not."""

    @cached_property
    def replicas(self) -> dict[LocalMap, list[Piece]]:
        """Pieces by what they hold; each list are replicas of each other, by rank."""
        groups: dict[LocalMap, list[Piece]] = {}
        for piece in self.pieces:
            groups.setdefault(piece.map, []).append(piece)
        return groups

    @cached_property
    def cover(self) -> list[tuple[Piece, Box]]:
        """One piece per distinct part, as boxes: together the tensor, once."""
        return [(pieces[0], box) for held, pieces in self.replicas.items() for box in boxes(held)]

    @property
    def is_present(self) -> bool:
        """Whether any rank recorded a tensor (a gradient may be None everywhere)."""
        return any(term.entry.file is not None for piece in self.pieces for term in piece.terms)

    def fetch(self, box: Box, scratch: Scratch | None = None) -> Tensor:
        """Return the global tensor's part at ``box``, put together from the pieces it meets.

        Args:
            box: The part.
            scratch: Memory for it, used where one piece holds all of it.
        """
        whole: Tensor | None = None
        for piece, held in self.cover:
            both = held.intersect(box)
            if both is None:
                continue
            if both[0].numel == box.numel:
                return piece.read(both[0], scratch)
            part = piece.read(both[0])
            if whole is None:
                whole = torch.empty(box.shape, dtype=torch.float64)
            offset = zip(both[0].start, both[0].shape, box.start, strict=True)
            whole[tuple(slice(at - first, at - first + n) for at, n, first in offset)] = part
        assert whole is not None, "fetch is only called on complete quantities"
        return whole


def weighted_sum(terms: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Add up at least one part, each with its weight; one at a time is in memory."""
    total: Tensor | None = None
    for weight, part in terms:
        if total is None:
            total = part if weight == 1.0 else part * weight
        else:
            total = torch.add(total, part, alpha=weight)
    assert total is not None, "a sum has at least one term"
    return total
