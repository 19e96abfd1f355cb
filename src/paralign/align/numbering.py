"""Layers by number: which one a stage that counts from 0 means, and who holds another's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paralign.align.places import Remap, own_name
from paralign.align.trace import Kind, RankIndex
from paralign.align.trace_reader import TraceReader


@dataclass(frozen=True)
class Numbered:
    """A name with a number in it: ``layers`` . 3 . ``attn.wq.weight``."""

    head: str
    number: int
    tail: str

    @classmethod
    def of(cls, name: str) -> Numbered | None:
        """Split a name at its first number; None if it has none."""
        parts = name.split(".")
        for at, part in enumerate(parts):
            if part.isdecimal():
                return cls(".".join(parts[:at]), int(part), ".".join(parts[at + 1 :]))
        return None

    @property
    def layer(self) -> str:
        """The name up to the number."""
        return f"{self.head}.{self.number}" if self.head else str(self.number)

    def at(self, number: int) -> str:
        """Return the same name in another layer."""
        layer = Numbered(self.head, number, self.tail).layer
        return f"{layer}.{self.tail}" if self.tail else layer


class StageNumbers:
    """Global numbers of the layers of stages that count their own ones from 0.

    A stage of a pipeline counts for itself where two stages have layers of the same number and all
    stages together have as many as the reference.

    Args:
        reader: The run under test.
        reference: Names of the reference's parameters.
    """

    def __init__(self, reader: TraceReader, reference: Iterable[str]) -> None:
        held: dict[str, dict[int, set[int]]] = {}
        self._stage = {index.rank: _stage(index) for index in reader.ranks}
        for index in reader.ranks:
            stage = self._stage[index.rank]
            for entry in index.tensors:
                numbered = Numbered.of(own_name(entry)) if entry.kind == Kind.PARAM else None
                if numbered is not None and stage is not None:
                    held.setdefault(numbered.head, {}).setdefault(stage, set()).add(numbered.number)
        total: dict[str, set[int]] = {}
        for name in reference:
            if (numbered := Numbered.of(name)) is not None:
                total.setdefault(numbered.head, set()).add(numbered.number)
        self._first: dict[tuple[str, int], int] = {}
        for head, stages in held.items():
            count = sum(map(len, stages.values()))
            distinct = len(set().union(*stages.values()))
            expected = (
                len(total[head]) if head in total else max(map(len, total.values()), default=0)
            )
            if distinct < count == expected:
                at = min(total.get(head, {0}))
                for stage in sorted(stages):
                    self._first[head, stage] = at - min(stages[stage])
                    at += len(stages[stage])

    def number(self, rank: int, name: str) -> int | None:
        """Return the global number of a layer by its own name; None if its stage does not count."""
        numbered, stage = Numbered.of(name), self._stage[rank]
        if numbered is None or stage is None or (numbered.head, stage) not in self._first:
            return None
        return self._first[numbered.head, stage] + numbered.number


def _stage(index: RankIndex) -> int | None:
    if index.stages is not None and len(index.stages) == 1:
        return index.stages[0]
    return index.coordinates.get("pp") if index.stages is None else None


@dataclass(frozen=True)
class Mismatch:
    """One tensor of one rank that holds the weights of another one."""

    rank: int
    name: str
    expected: str
    holds: str
    is_followed: bool


def remaps_of(mismatches: Iterable[Mismatch]) -> list[Remap]:
    """Join mismatches of the same layers, then of ranks that agree on all of their tensors."""
    layers: dict[tuple[str, str, str, bool], dict[int, set[str]]] = {}
    for item in mismatches:
        names = _as_layers(item) or (item.name, item.expected, item.holds)
        by_rank = layers.setdefault((*names, item.is_followed), {})
        by_rank.setdefault(item.rank, set()).add(item.name)
    remaps = [
        Remap(
            ranks=tuple(sorted(by_rank)),
            name=name,
            expected=expected,
            holds=holds,
            tensors=tuple(sorted(set().union(*by_rank.values()))),
            is_followed=is_followed,
        )
        for (name, expected, holds, is_followed), by_rank in layers.items()
    ]
    return sorted(remaps, key=lambda remap: (remap.ranks, remap.name))


def _as_layers(item: Mismatch) -> tuple[str, str, str] | None:
    found = [Numbered.of(name) for name in (item.name, item.expected, item.holds)]
    own, expected, holds = found
    if own is None or expected is None or holds is None:
        return None
    if expected.tail != holds.tail or expected.number == holds.number:
        return None
    return own.layer, expected.layer, holds.layer


def moved(
    names: Iterable[str], number: int, known: Mapping[str, tuple[int, ...]]
) -> dict[str, str] | None:
    """Return the same tensors in layer ``number``; None if one is missing or of another shape."""
    table = {}
    for name in names:
        numbered = Numbered.of(name)
        target = name if numbered is None else numbered.at(number)
        if known.get(target) != known[name]:
            return None
        table[name] = target
    return table
