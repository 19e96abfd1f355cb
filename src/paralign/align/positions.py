"""Pair weights whose values say nothing (norms, biases, equal layers) by where they belong.

What says where: the layer that a stage's own number means; the weight of the same module, whose
rows a bias goes with; the order within the smallest module around it whose weights are paired.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from paralign.align.lens import Lens
from paralign.align.measure import unequal_pieces
from paralign.align.numbering import Numbered
from paralign.align.pair import Piece, Quantity, Term
from paralign.align.places import CONTENT, POSITION, Pairing, Place
from paralign.align.regions import as_map, held_parts
from paralign.align.start_weights import Item, StartValues
from paralign.align.trace_reader import TraceReader
from paralign.layout import Box, boxes


class Positions:
    """Places what content could not.

    Args:
        items: All weights of the run.
        unplaced: Those without a place so far.
        whole: The reference's weights.
        reader: The run.
        pairing: What is known so far; takes the places.
    """

    def __init__(
        self,
        items: Sequence[Item],
        unplaced: Sequence[Item],
        whole: Mapping[str, Quantity],
        reader: TraceReader,
        pairing: Pairing,
    ) -> None:
        self._whole = whole
        self._reader = reader
        self._pairing = pairing
        self._unplaced = {item.key: item for item in unplaced}
        self._by_rank: dict[int, list[Item]] = {}
        for item in items:
            self._by_rank.setdefault(item.rank, []).append(item)
        self._order = {name: at for at, name in enumerate(whole)}
        self._placed: set[tuple[int, str]] = set()
        self._values = StartValues(reader)

    def run(self) -> None:
        """Place what can be placed, and say why of the rest."""
        self._note_modules()
        self._withdraw_names()
        for item in list(self._unplaced.values()):
            if not self._by_layer(item):
                self._by_weight(item)
        for items in self._by_rank.values():
            for depth in sorted({item.own.count(".") for item in items}, reverse=True):
                for item in items:
                    if item.own.count(".") == depth and item.key in self._unplaced:
                        self._by_order(item, items)
        for item in self._unplaced.values():
            self._give_up(item)
        self._note_modules()

    def _withdraw_names(self) -> None:
        """Doubt names that agree by value alone where the module around them is another one.

        A norm's ones are equal in all layers: on a stage that calls its first layer ``layers.0``
        they are not the reference's ``layers.0`` if the weights next to them are not.
        """
        for items in self._by_rank.values():
            for item in items:
                if item.key in self._unplaced or item.match.parts or not item.is_equal:
                    continue
                if not self._values.are_constant(item):
                    continue
                expected = self._by_neighbours(item, items)
                if expected is not None and expected != item.claimed and expected in self._whole:
                    self._unplaced[item.key] = item

    def _by_neighbours(self, item: Item, items: Sequence[Item]) -> str | None:
        """Return the name a weight should have, by the smallest module whose weights are paired."""
        around = item.own.rpartition(".")[0]
        while around:
            pairs = self._paired_inside(around, item, items)
            if pairs:
                return _module_like(around, pairs) + item.own.removeprefix(around)
            around = around.rpartition(".")[0]
        return None

    def _paired_inside(
        self, around: str, item: Item, items: Sequence[Item]
    ) -> list[tuple[str, str]]:
        """Return ``(own name, the reference's)`` of the weights of a module that are paired."""
        pairs = []
        for other in items:
            if other is not item and _is_in(other.own, around) and self._is_certain(other):
                pairs += [(other.own, name) for name in self._names_of(other)]
        return pairs

    def _is_certain(self, item: Item) -> bool:
        """Whether a weight's place is more than a name under which a constant is found."""
        if item.key in self._unplaced:
            return False
        if item.match.parts or item.key in self._placed:
            return True
        return item.is_equal and not self._values.are_constant(item)

    def _names_of(self, item: Item) -> list[str]:
        places = self._pairing.found.get(item.key)
        return [item.claimed] if places is None else [place.name for place in places]

    def _by_layer(self, item: Item) -> bool:
        """The layer is known by number, since its stage counts for itself."""
        numbered = Numbered.of(item.claimed)
        if item.number is None or numbered is None:
            return False
        return self._try(item, numbered.at(item.number), check=item.is_equal)

    def _by_weight(self, item: Item) -> bool:
        """A bias goes with the rows of the weight in the same module."""
        module, _, leaf = item.own.rpartition(".")
        if len(item.entry.held_shape) != 1 or item.entry.flat is not None:
            return False
        for other in self._by_rank[item.rank]:
            places = self._pairing.found.get(other.key, ())
            if other.own.rpartition(".")[0] != module or other is item or not places:
                continue
            follow = [self._along(item, leaf, other.entry.held_shape, place) for place in places]
            found = [place for place in dict.fromkeys(follow) if place is not None]
            if found and all(follow) and self._is_equal(item, found):
                self._set(item, found)
                return True
        return False

    def _along(self, item: Item, leaf: str, stored: tuple[int, ...], place: Place) -> Place | None:
        """Return what the bias is, of the bias next to a weight that is (part of) ``place``."""
        name = f"{place.name.rpartition('.')[0]}.{leaf}"
        whole = self._whole.get(name)
        if whole is None or place.lens is None or len(stored) != 2 or len(place.shape) != 2:
            return None
        rows, columns = stored
        (box,) = boxes(place.map)
        step = place.lens.strides[0]
        if whole.shape != place.shape[:1]:
            return None
        if step % columns == 0 and item.entry.held_shape == (rows,):
            lens = Lens(place.lens.offset // columns, (step // columns,))
        elif step < columns and item.entry.held_shape == (columns,):
            lens = Lens(place.lens.offset % columns, (step,))
        else:
            return None
        part = Box((0,), box.start[:1], box.shape[:1])
        return Place(name, whole.shape, as_map(part), lens, True)

    def _by_order(self, item: Item, items: Sequence[Item]) -> bool:
        """The n-th of its like in a module is the n-th of its like in the reference's module."""
        around = item.own.rpartition(".")[0]
        while True:
            pairs = self._paired_inside(around, item, items)
            if pairs:
                block = _module_like(around, pairs)
                named = block + item.own.removeprefix(around) if around else item.own
                if self._try(item, named, check=True):
                    return True
                # The order says nothing of weights that could be told apart but are copies.
                if self._values.are_constant(item) and self._by_rank_in(item, items, around, block):
                    return True
            if not around:
                return False
            around = around.rpartition(".")[0]

    def _by_rank_in(self, item: Item, items: Sequence[Item], around: str, block: str) -> bool:
        """Count the weights like this one in a module, here and there."""
        inside = [other for other in items if _is_in(other.own, around)]
        theirs = [name for name in self._candidates(block, items, item) if self._fits(item, name)]
        if not around:
            # The whole model: only between the nearest neighbours that are paired.
            at = inside.index(item)
            places = [self._last(other) for other in inside]
            low = next((n for n in range(at - 1, -1, -1) if places[n] is not None), -1)
            high = next((n for n in range(at + 1, len(places)) if places[n] is not None), None)
            inside = inside[low + 1 : high]
            first = -1 if low < 0 else places[low]
            last = len(self._order) if high is None else places[high]
            assert first is not None and last is not None
            theirs = [name for name in theirs if first < self._order[name] < last]
        mine = [other for other in inside if self._is_like(other, item)]
        return len(mine) == len(theirs) and self._try(item, theirs[mine.index(item)], check=True)

    def _candidates(self, block: str, items: Sequence[Item], item: Item) -> list[str]:
        """Return the reference's weights in a module that nothing on this rank is paired with."""
        taken = {
            name
            for other in items
            if other.key not in self._unplaced and not self._is_like(other, item)
            for name in self._names_of(other)
        }
        return [name for name in self._whole if _is_in(name, block) and name not in taken]

    def _last(self, item: Item) -> int | None:
        """Return the place in the reference's order of the last tensor that an item is of."""
        if not self._is_certain(item):
            return None
        known = [self._order[name] for name in self._names_of(item) if name in self._order]
        return max(known, default=None)

    def _is_like(self, other: Item, item: Item) -> bool:
        """Whether two weights of a rank have the same shape and value, so that order decides."""
        if other is item:
            return True
        if other.entry.held_shape != item.entry.held_shape or other.entry.shape != item.entry.shape:
            return False
        was_open = other.key in self._unplaced or other.key in self._placed
        return was_open and self._values.begin_alike(other, item)

    def _fits(self, item: Item, name: str) -> bool:
        places = self._own_places(item, name)
        return places is not None and self._is_equal(item, places)

    def _try(self, item: Item, name: str, *, check: bool) -> bool:
        places = self._own_places(item, name)
        if places is None or (check and not self._is_equal(item, places)):
            return False
        self._set(item, places)
        return True

    def _own_places(self, item: Item, name: str) -> list[Place] | None:
        """Return the places of a weight as its own map says, in the reference's ``name``."""
        whole = self._whole.get(name)
        if whole is None or whole.shape != (item.entry.true_shape or item.entry.shape):
            return None
        return [Place(name, whole.shape, held, lens, True) for held, lens in held_parts(item.entry)]

    def _is_equal(self, item: Item, places: Iterable[Place]) -> bool:
        for place in places:
            term = Term(1.0, item.entry, place.lens)
            piece = Piece(item.rank, place.map, (term,), self._reader)
            held = Quantity(place.shape, (piece,), ())
            if unequal_pieces(held, self._whole[place.name]):
                return False
        return True

    def _set(self, item: Item, places: Sequence[Place]) -> None:
        del self._unplaced[item.key]
        self._pairing.equal.discard(item.key)
        self._pairing.found[item.key] = tuple(places)
        self._placed.add(item.key)
        for place in places:
            if self._pairing.paired_by.get(place.name) != CONTENT:
                self._pairing.paired_by[place.name] = POSITION

    def _give_up(self, item: Item) -> None:
        if item.claimed in self._whole:
            return  # compared under its name, whatever it holds
        alike = item.match.alike
        if alike:
            shown = ", ".join(alike[:3]) + (", ..." if len(alike) > 3 else "")
            why = f"at start it is equal to {len(alike)} tensors of the reference ({shown})"
        elif item.can_be_searched:
            why = "nothing in the reference has its values at start"
        else:
            why = "its values cannot be looked for"
        self._pairing.unpaired.setdefault(item.claimed, f"{why}. Say which it is with names=")

    def _note_modules(self) -> None:
        """Say which module of the reference each module is, where its weights are of one."""
        for (rank, own), places in self._pairing.found.items():
            module = own.rpartition(".")[0]
            targets = {place.name.rpartition(".")[0] for place in places}
            while module and len(targets) == 1:
                (target,) = targets
                if not target or (rank, module) in self._pairing.modules:
                    break
                self._pairing.modules[rank, module] = target
                if module.rpartition(".")[2] != target.rpartition(".")[2]:
                    break
                module, targets = module.rpartition(".")[0], {target.rpartition(".")[0]}


def _is_in(name: str, module: str) -> bool:
    return not module or name.startswith(module + ".")


def _module_like(around: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the reference's module that is what ``around`` is here, from what is paired in it."""
    own = _common([name for name, _ in pairs])
    theirs = _common([name for _, name in pairs])
    # All of it in one child on both sides (layers.0.mlp, layers.2.mlp): look at what is around.
    while own != around and own and own.rpartition(".")[2] == theirs.rpartition(".")[2]:
        own, theirs = own.rpartition(".")[0], theirs.rpartition(".")[0]
    return theirs


def _common(names: Sequence[str]) -> str:
    """Return the module that holds all of ``names``."""
    paths = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in shared)
