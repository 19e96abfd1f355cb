"""Pair a run's weights with the reference's: by name and place, by content, by position, by rule.

The weights at the start decide, and all that follows them (gradients, moments, later weights) is
paired alike. In this order: (1) a global name under which the reference has the same values; (2)
content, for any other name, shard, fusion or order; (3) for weights that are the same everywhere at
start (norms, biases): the module they belong to, and their order in it; the user's rule gives
names, which are checked like any other. Weights of equal content are never paired by guess.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paralign.align.content import ContentIndex, Part
from paralign.align.flat import flat_boxes
from paralign.align.lens import Lens
from paralign.align.lines import ReadRows, Stack
from paralign.align.measure import unequal_pieces
from paralign.align.name_rules import NameRule
from paralign.align.names_given import given_places
from paralign.align.numbering import Mismatch, Numbered, StageNumbers, moved, remaps_of
from paralign.align.pair import Moment, Quantity, Side
from paralign.align.places import CONTENT, RULE, Pairing, Place, own_name
from paralign.align.positions import Positions
from paralign.align.regions import as_map, held_parts
from paralign.align.start_weights import Item, is_readable
from paralign.align.trace import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, Interval


def pair_runs(
    reference: Side, reader: TraceReader, *, step: int, names: NameRule = None
) -> Pairing:
    """Find what each tensor of a run is of the reference's.

    Args:
        reference: The run to be equal to, under its own names.
        reader: The run under test.
        step: The first step both recorded; its weights are those at the start.
        names: The user's rule: own name or pattern -> the reference's, or ``Fused``; or a function.

    Raises:
        ConfigError: The rule names what does not exist, or cannot be applied.
    """
    pairing = Pairing()
    given_places(reader, names, pairing)
    moment = Moment.of(step, Kind.PARAM)
    side = Side(reader, pairing)
    if moment in reference.moments() and moment in side.moments():
        _Pairer(reference, side, moment, pairing).run()
    return pairing


class _Pairer:
    def __init__(self, reference: Side, side: Side, moment: Moment, pairing: Pairing) -> None:
        self._side = side
        self._moment = moment
        self._pairing = pairing
        self._whole: dict[str, Quantity] = {}
        for name in reference.names(moment):
            quantity = reference.quantity(moment, name)
            if quantity is not None and quantity.is_present and not quantity.problems:
                self._whole[name] = quantity
        self._shapes = {name: quantity.shape for name, quantity in self._whole.items()}
        self._reference = reference
        self._numbers = StageNumbers(side.reader, self._whole)
        self._items = [
            Item(index.rank, entry, self._claimed(index.rank, entry))
            for index in side.reader.ranks
            for entry in index.tensors
            if Moment.of(entry.step, entry.kind, entry.state) == moment
        ]

        self._is_renamed = any(item.entry.source is not None for item in self._items)

    def run(self) -> None:
        self._check_names()
        for item in self._items:
            item.number = self._numbers.number(item.rank, item.own)
        open_items = [item for item in self._items if not item.is_equal or self._is_elsewhere(item)]
        if not open_items:
            return
        self._match([item for item in open_items if item.can_be_searched])
        mismatches: list[Mismatch] = []
        unplaced = [item for item in open_items if not self._place(item, mismatches)]
        self._pairing.remaps += remaps_of(mismatches)
        Positions(self._items, unplaced, self._whole, self._side.reader, self._pairing).run()

    def _claimed(self, rank: int, entry: TensorEntry) -> str:
        places = self._pairing.found.get((rank, own_name(entry)))
        name = places[0].name if places else entry.name
        if name not in self._shapes:
            aliases = [alias for alias in entry.aliases if alias in self._shapes]
            name = aliases[0] if aliases else name
        return name

    def _check_names(self) -> None:
        """See which weights are what the reference has under their name."""
        pieces: dict[tuple[int, str], bool] = {}
        for name in self._side.names(self._moment):
            own = self._side.quantity(self._moment, name)
            base = self._whole.get(name) or self._reference.quantity(self._moment, name)
            if own is None or base is None or base.problems or own.shape != base.shape:
                continue
            unequal = unequal_pieces(own, base)
            for piece in own.pieces:
                for term in piece.terms:
                    key = (piece.rank, own_name(term.entry))
                    pieces[key] = pieces.get(key, True) and piece not in unequal
        for item in self._items:
            # Summands are no values: what they add up to is compared under their name.
            item.is_equal = pieces.get(item.key, False) or bool(item.entry.partial_over)
        self._pairing.equal |= {key for key, is_equal in pieces.items() if is_equal}

    def _is_elsewhere(self, item: Item) -> bool:
        """Whether a stage that counts for itself means another layer than the name says."""
        numbered = Numbered.of(item.claimed)
        return item.number is not None and numbered is not None and numbered.number != item.number

    def _match(self, items: Sequence[Item]) -> None:
        entries = [item.entry for item in self._items] + [
            term.entry for base in self._whole.values() for term in base.pieces[0].terms
        ]
        dtypes = {getattr(torch, entry.dtype) for entry in entries if is_readable(entry)}
        narrow = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float64)
        stacks = [Stack(item.entry.held_shape) for item in items]
        lengths = {n for stack in stacks for n in (stack.rows, stack.columns)}
        index = ContentIndex(
            {
                name: (base.shape, _rows_of(base, narrow))
                for name, base in self._whole.items()
                if 0 not in base.shape
            },
            lengths,
        )
        for item, stack in zip(items, stacks, strict=True):
            read = _stored_rows(self._side.reader, item.entry, stack, narrow)
            item.match = index.match(item.entry.held_shape, read)

    def _place(self, item: Item, mismatches: list[Mismatch]) -> bool:
        """Give a weight the places its content has; False if content does not tell."""
        match = item.match
        is_named = self._shapes.get(item.claimed) == item.entry.shape
        if not match.parts or (is_named and not match.is_complete):
            return False
        if match.unknown_from is None and 2 * match.num_unknown > match.num_lines:
            return False  # a few lines in common do not make it the same tensor
        names = self._names_for(item, is_named, mismatches)
        self._pairing.equal.discard(item.key)
        self._pairing.found[item.key] = tuple(
            Place(names[part.name], self._shapes[part.name], as_map(part.box), part.lens, True)
            for part in match.parts
        )
        for name in names.values():
            if self._pairing.paired_by.get(name) != RULE or item.claimed != name:
                self._pairing.paired_by[name] = CONTENT
        self._note_rest(item)
        return True

    def _names_for(self, item: Item, is_named: bool, mismatches: list[Mismatch]) -> dict[str, str]:
        """Return under which name each tensor that a weight holds is compared; note what is odd."""
        expected = self._expected(item, is_named)
        names = dict(zip(item.match.names, item.match.names, strict=True))
        if expected is not None and set(expected.values()) != set(names):
            is_followed = self._is_only_named(item)
            if not is_followed or item.entry.source is not None or item.key in self._pairing.found:
                mismatches += [
                    Mismatch(item.rank, item.own, target, held, is_followed)
                    for held, target in expected.items()
                ][:1]
            if not is_followed:
                names = expected
        elif is_named and item.number is not None and item.claimed not in names:
            # Its stage counts for itself, and holds what it should; a rule may have called it else.
            if self._is_renamed:
                held = item.match.names[0]
                mismatches.append(Mismatch(item.rank, item.own, item.claimed, held, True))
        elif is_named and item.claimed in names and not self._is_in_place(item, item.match.parts):
            # The right tensor, but other parts of it than its map says.
            mismatches.append(Mismatch(item.rank, item.own, item.claimed, item.claimed, True))
        return names

    def _expected(self, item: Item, is_named: bool) -> dict[str, str] | None:
        """Return, per tensor that it holds, which one it should hold; None if nothing tells."""
        held = item.match.names
        if item.number is not None:
            return moved(held, item.number, self._shapes)
        if is_named and len(held) == 1:
            return {held[0]: item.claimed}
        numbered = Numbered.of(item.claimed)
        if is_named or item.claimed in self._shapes:
            return None if numbered is None else moved(held, numbered.number, self._shapes)
        return None

    def _is_only_named(self, item: Item) -> bool:
        """Whether a weight that is not what its name says is wrong by name alone.

        A name that a rule gave says nothing of the module. Nor does a stage's own number, where
        nothing is known of stages but all of the rank's layers are equally far from their names.
        """
        if item.number is not None:
            return False
        if item.entry.source is not None or item.key in self._pairing.found:
            return True
        shifts = set()
        for other in self._items:
            if other.rank != item.rank or other.is_equal or len(other.match.names) != 1:
                continue
            own, held = Numbered.of(other.claimed), Numbered.of(other.match.names[0])
            if own is not None and held is not None:
                shifts.add(held.number - own.number)
        kept = {other.rank for other in self._items if other.is_equal and other.own == item.own}
        return len(shifts) == 1 and bool(kept) and not self._side.reader.ranks[item.rank].axes

    def _is_in_place(self, item: Item, parts: Sequence[Part]) -> bool:
        """Whether the parts are those that the map says."""
        said = {held for held, _ in held_parts(item.entry)}
        if len(parts) != len(said):
            return False
        return {as_map(part.box) for part in parts} == said

    def _note_rest(self, item: Item) -> None:
        """Say what of a stored weight the reference does not have: padding, or something else."""
        match = item.match
        if not match.num_unknown:
            return
        last = max(match.parts, key=lambda part: part.lens.offset)
        ends = last.box.start[0] + last.box.shape[0] == self._shapes[last.name][0]
        if match.unknown_from is not None and ends:
            self._pairing.notes.append(
                f"{item.own} of rank {item.rank}: its last {match.num_unknown} of "
                f"{match.num_lines} rows lie beyond {last.name}: padding, not compared"
            )
            return
        self._pairing.unpaired[item.own] = (
            f"{match.num_unknown} of its {match.num_lines} rows or columns on rank {item.rank} are "
            "nowhere in the reference"
        )


def _rows_of(base: Quantity, dtype: torch.dtype) -> ReadRows:
    stack = Stack(base.shape)

    def read(first: int, last: int) -> Tensor:
        boxes = flat_boxes(base.shape, first * stack.columns, last * stack.columns)
        rows = [
            base.fetch(_as_box(flat.intervals)).reshape(-1, stack.columns).to(dtype)
            for flat in boxes
        ]
        return torch.cat(rows)

    return read


def _as_box(intervals: Sequence[Interval]) -> Box:
    """Return the box with these intervals."""
    start = tuple(first for first, _ in intervals)
    return Box(start, start, tuple(last - first for first, last in intervals))


def _stored_rows(
    reader: TraceReader, entry: TensorEntry, stack: Stack, dtype: torch.dtype
) -> ReadRows:
    lens = Lens(0, (stack.columns, 1))

    def read(first: int, last: int) -> Tensor:
        box = Box((first, 0), (first, 0), (last - first, stack.columns))
        return reader.read(entry, box, lens).to(dtype)

    return read
