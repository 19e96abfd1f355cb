"""Bring together what two traces say about the same tensor, piece by piece, without assembling it.

A *quantity* is a tensor of one kind at one step under one name; each side holds it in pieces.
Pieces with the same map are replicas. Pairing here is by global names and placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paralign.align.trace import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, LocalMap, boxes, overlap_elements

UPDATE = "update"
"""Derived: the parameter after a step minus the parameter before it."""

KIND_ORDER = (
    Kind.PARAM,
    "tokens",
    "loss",
    Kind.GRAD,
    "norm",
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


@dataclass(frozen=True)
class Piece:
    """What one rank (or, for a pending sum, one group) holds of a quantity."""

    rank: int
    map: LocalMap
    terms: tuple[tuple[float, TensorEntry], ...]
    reader: TraceReader

    @property
    def identity(self) -> tuple[int, LocalMap, str | None]:
        """What is the same for the same piece at another moment."""
        return self.rank, self.map, self.terms[0][1].source

    def read(self, box: Box) -> Tensor:
        """Return the part ``box`` in fp64."""
        total: Tensor | None = None
        for weight, entry in self.terms:
            part = self.reader.read(entry, box).to(torch.float64)
            part = part if weight == 1.0 else part * weight
            total = part if total is None else total + part
        assert total is not None, "a piece has at least one term"
        return total


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
        return any(entry.file is not None for piece in self.pieces for _, entry in piece.terms)

    def fetch(self, box: Box) -> Tensor:
        """Return the global tensor's part at ``box``, put together from the pieces it meets."""
        whole: Tensor | None = None
        for piece, held in self.cover:
            both = held.intersect(box)
            if both is None:
                continue
            part = piece.read(both[0])
            if both[0].numel == box.numel:
                return part
            if whole is None:
                whole = torch.empty(box.shape, dtype=torch.float64)
            offset = zip(both[0].start, both[0].shape, box.start, strict=True)
            whole[tuple(slice(at - first, at - first + n) for at, n, first in offset)] = part
        assert whole is not None, "fetch is only called on complete quantities"
        return whole


class Side:
    """One trace, by moment and name."""

    def __init__(self, reader: TraceReader) -> None:
        self.reader = reader
        self._entries: dict[Moment, dict[str, list[tuple[int, TensorEntry]]]] = {}
        self._first_name: dict[str, str] = {}
        self._reached: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index in reader.ranks:
            for entry in index.tensors:
                moment = Moment.of(entry.step, entry.kind, entry.state)
                by_name = self._entries.setdefault(moment, {})
                by_name.setdefault(entry.name, []).append((index.rank, entry))
                for alias in entry.aliases:
                    self._first_name.setdefault(alias, entry.name)

    def moments(self) -> list[Moment]:
        """Everything recorded, and the updates that follow from it, in causal order."""
        updates = [
            Moment.of(moment.step, UPDATE)
            for moment in self._entries
            if moment.kind == Kind.PARAM_AFTER and self._before(moment.step) is not None
        ]
        return sorted([*self._entries, *updates])

    def names(self, moment: Moment) -> list[str]:
        """Names recorded at a moment, in the order of the model."""
        kind = Kind.PARAM_AFTER if moment.kind == UPDATE else moment.kind
        state = None if moment.kind == UPDATE else moment.state
        return list(self._entries.get(Moment.of(moment.step, kind, state), {}))

    def quantity(self, moment: Moment, name: str) -> Quantity | None:
        """Return what this side holds under ``name`` or an alias of it; None if nothing."""
        if moment.kind == UPDATE:
            return self._update(moment.step, name)
        by_name = self._entries.get(moment, {})
        found = by_name.get(name) or by_name.get(self._first_name.get(name, name))
        if not found:
            return None
        pieces = self._pieces(found)
        shape = found[0][1].shape
        return Quantity(shape, pieces, tuple(self._problems(found, pieces, shape)))

    def _before(self, step: int) -> Moment | None:
        """Return where the parameters before ``step`` are recorded."""
        for moment in (Moment.of(step - 1, Kind.PARAM_AFTER), Moment.of(step, Kind.PARAM)):
            if moment in self._entries:
                return moment
        return None

    def _update(self, step: int, name: str) -> Quantity | None:
        before_moment = self._before(step)
        after = self.quantity(Moment.of(step, Kind.PARAM_AFTER), name)
        before = None if before_moment is None else self.quantity(before_moment, name)
        if after is None or before is None:
            return None
        earlier = {piece.identity: piece for piece in before.pieces}
        pieces, problems = [], [*after.problems, *before.problems]
        for piece in after.pieces:
            partner = earlier.get(piece.identity)
            if partner is None:
                problems.append(f"rank {piece.rank} holds another part after the step than before")
                continue
            minus = tuple((-weight, entry) for weight, entry in partner.terms)
            pieces.append(Piece(piece.rank, piece.map, piece.terms + minus, self.reader))
        return Quantity(after.shape, tuple(pieces), tuple(dict.fromkeys(problems)))

    def _pieces(self, found: Sequence[tuple[int, TensorEntry]]) -> tuple[Piece, ...]:
        """Turn entries into pieces; those of a pending sum become one piece per group."""
        pieces: list[Piece] = []
        groups: dict[tuple[frozenset[int], LocalMap], list[tuple[int, TensorEntry]]] = {}
        for rank, entry in found:
            if entry.partial_over:
                peers = frozenset(self._peers(rank, entry.partial_over))
                groups.setdefault((peers, entry.map), []).append((rank, entry))
            else:
                pieces.append(Piece(rank, entry.map, ((1.0, entry),), self.reader))
        for (_, held), members in groups.items():
            weight = 1.0 / len(members) if members[0][1].partial_op == "avg" else 1.0
            terms = tuple((weight, entry) for _, entry in members)
            pieces.append(Piece(members[0][0], held, terms, self.reader))
        return tuple(pieces)

    def _problems(
        self,
        found: Sequence[tuple[int, TensorEntry]],
        pieces: Sequence[Piece],
        shape: tuple[int, ...],
    ) -> Iterable[str]:
        if any(entry.shape != shape for _, entry in found):
            shapes = sorted({str(list(entry.shape)) for _, entry in found})
            yield f"ranks disagree on its global shape: {', '.join(shapes)}"
            return
        for rank, entry in found:
            if absent := sorted(set(self._peers(rank, entry.partial_over)) - {r for r, _ in found}):
                yield f"summands of rank {', '.join(map(str, absent))} are missing"
        total = Box((), (), shape).numel
        parts = [box for held in {piece.map for piece in pieces} for box in boxes(held)]
        twice = overlap_elements(parts)
        missing = total - sum(box.numel for box in parts) + twice
        if twice:
            yield f"{twice} elements are held twice, by pieces that overlap"
        if missing > 0:
            yield f"{missing} of {total} elements are missing"
        yield from self._missing_replicas(found)

    def _missing_replicas(self, found: Sequence[tuple[int, TensorEntry]]) -> Iterable[str]:
        holders: dict[LocalMap, set[int]] = {}
        for rank, entry in found:
            holders.setdefault(entry.map, set()).add(rank)
        for rank, entry in found:
            absent = set(self._peers(rank, entry.replicated_over)) - holders[entry.map]
            if absent:
                yield (
                    f"the replica on rank {', '.join(map(str, sorted(absent)))} is missing "
                    f"(replicated over {', '.join(entry.replicated_over)})"
                )
                return

    def _peers(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        """Return the ranks that differ from ``rank`` only along ``axes``, itself included."""
        known = self._reached.get((rank, axes))
        if known is not None:
            return known
        reached, queue = {rank}, [rank]
        while queue:
            index = self.reader.ranks[queue.pop()]
            new = {peer for axis in axes for peer in index.axes.get(axis, [])} - reached
            reached |= new
            queue += new
        self._reached[rank, axes] = sorted(reached)
        return self._reached[rank, axes]
