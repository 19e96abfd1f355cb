"""Bring together what a trace says about the same tensor, piece by piece, without assembling it.

Names and maps are the trace's own, or for the run under test those that ``pairing`` found.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paralign.align.lens import Lens, row_major
from paralign.align.places import Pairing, Place
from paralign.align.quantity import KIND_ORDER as KIND_ORDER
from paralign.align.quantity import UPDATE as UPDATE
from paralign.align.quantity import Moment as Moment
from paralign.align.quantity import Piece as Piece
from paralign.align.quantity import Quantity as Quantity
from paralign.align.quantity import Term as Term
from paralign.align.regions import apart, as_map, global_shape, held_parts
from paralign.align.trace import TOKEN_KINDS, Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, LocalMap, boxes, overlap_elements


class _Held(NamedTuple):
    """A part of a quantity on a rank."""

    rank: int
    entry: TensorEntry
    place: Place


class Side:
    """One trace, by moment and name.

    Args:
        reader: The trace.
        pairing: What its tensors are of the reference's; None: what the trace itself says.
    """

    def __init__(self, reader: TraceReader, pairing: Pairing | None = None) -> None:
        self.reader = reader
        self.pairing = pairing
        self._entries: dict[Moment, dict[str, list[_Held]]] = {}
        self._first_name: dict[str, str] = {}
        self._reached: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for index in reader.ranks:
            for entry in index.tensors:
                if entry.kind in TOKEN_KINDS:
                    continue  # placed by token maps, see ``activation_pair``
                moment = Moment.of(entry.step, entry.kind, entry.state)
                by_name = self._entries.setdefault(moment, {})
                places = None if pairing is None else pairing.places(index.rank, entry)
                placed = own_places(entry) if places is None else places
                for place in placed:
                    by_name.setdefault(place.name, []).append(_Held(index.rank, entry, place))
                for alias in entry.aliases:
                    self._first_name.setdefault(alias, placed[0].name if placed else entry.name)

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
        shape = found[0].place.shape
        if any(held.place.shape != shape for held in found):
            shapes = sorted({str(list(held.place.shape)) for held in found})
            why = f"ranks disagree on its global shape: {', '.join(shapes)}"
            return Quantity(shape, self._pieces(found), (why,))
        pieces = self._pieces(found)
        overlap = overlap_elements(_parts(pieces))
        if overlap and all(len(boxes(piece.map)) == 1 for piece in pieces):
            pieces, overlap = _without_overlap(pieces), 0
        problems = self._problems(found, pieces, shape, overlap)
        return Quantity(shape, pieces, tuple(problems))

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
            minus = tuple(term._replace(weight=-term.weight) for term in partner.terms)
            pieces.append(Piece(piece.rank, piece.map, piece.terms + minus, self.reader))
        return Quantity(after.shape, tuple(pieces), tuple(dict.fromkeys(problems)))

    def _pieces(self, found: Sequence[_Held]) -> tuple[Piece, ...]:
        """Turn entries into pieces; those of a pending sum become one piece per group."""
        pieces: list[Piece] = []
        groups: dict[tuple[frozenset[int], LocalMap], list[_Held]] = {}
        for held in found:
            if held.entry.partial_over:
                peers = frozenset(self._peers(held.rank, held.entry.partial_over))
                groups.setdefault((peers, held.place.map), []).append(held)
            else:
                term = Term(1.0, held.entry, held.place.lens)
                pieces.append(Piece(held.rank, held.place.map, (term,), self.reader))
        for (_, held_map), members in groups.items():
            weight = 1.0 / len(members) if members[0].entry.partial_op == "avg" else 1.0
            terms = tuple(Term(weight, held.entry, held.place.lens) for held in members)
            pieces.append(Piece(members[0].rank, held_map, terms, self.reader))
        return tuple(pieces)

    def _problems(
        self,
        found: Sequence[_Held],
        pieces: Sequence[Piece],
        shape: tuple[int, ...],
        overlap: int,
    ) -> Iterable[str]:
        ranks = {held.rank for held in found}
        for held in found:
            if absent := sorted(set(self._peers(held.rank, held.entry.partial_over)) - ranks):
                yield f"summands of rank {', '.join(map(str, absent))} are missing"
        total = Box((), (), shape).numel
        missing = total - sum(box.numel for box in _parts(pieces)) + overlap
        if overlap:
            yield f"{overlap} elements are held twice, by pieces that overlap"
        if missing > 0:
            yield f"{missing} of {total} elements are missing"
        yield from self._missing_replicas(found)

    def _missing_replicas(self, found: Sequence[_Held]) -> Iterable[str]:
        holders: dict[LocalMap, set[int]] = {}
        for held in found:
            holders.setdefault(held.place.map, set()).add(held.rank)
        for held in found:
            if held.place.is_found:
                continue  # what the run says of replicas is not what its tensors are
            absent = set(self._peers(held.rank, held.entry.replicated_over))
            absent -= holders[held.place.map]
            if absent:
                yield (
                    f"the replica on rank {', '.join(map(str, sorted(absent)))} is missing "
                    f"(replicated over {', '.join(held.entry.replicated_over)})"
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


def own_places(entry: TensorEntry) -> list[Place]:
    """Return what an entry says of itself."""
    shape = global_shape(entry)
    return [Place(entry.name, shape, held, lens) for held, lens in held_parts(entry)]


def _parts(pieces: Sequence[Piece]) -> list[Box]:
    """Return every distinct part that is held, as boxes."""
    return [box for held in {piece.map for piece in pieces} for box in boxes(held)]


def _without_overlap(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Cut pieces of one box each until any two are replicas or disjoint.

    Ranks may hold the same elements in unlike portions: a whole head here, a slice of it there.
    """
    whole = [boxes(piece.map)[0] for piece in pieces]
    cut: list[Piece] = []
    for piece, parts in zip(pieces, apart(whole), strict=True):
        for part in parts:
            terms = tuple(
                term._replace(lens=_lens_of(term).shifted(part.local)) for term in piece.terms
            )
            cut.append(Piece(piece.rank, as_map(part), terms, piece.reader))
    return tuple(cut)


def _lens_of(term: Term) -> Lens:
    return term.lens or Lens(0, row_major(term.entry.held_shape))
