"""Find where the lines of a weight are in the reference, by content: no names, no rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paralign.align.flat import flat_boxes
from paralign.align.lens import Lens, row_major
from paralign.align.lines import (
    COLUMNS,
    ROWS,
    SHORTEST,
    ReadRows,
    Stack,
    line_hashes,
    offsets,
)
from paralign.layout import Box

# How a stored tensor's lines may lie in the reference: as they are, or transposed.
_WAYS = ((ROWS, ROWS), (COLUMNS, COLUMNS), (ROWS, COLUMNS), (COLUMNS, ROWS))


@dataclass(frozen=True)
class Part:
    """A box of a reference tensor, and how it is stored here."""

    name: str
    box: Box
    lens: Lens


@dataclass
class Match:
    """What was found of one stored tensor.

    Every line is found, ambiguous (several places in the reference have its content) or unknown.
    """

    parts: list[Part] = field(default_factory=list)
    num_lines: int = 0
    num_found: int = 0
    num_unknown: int = 0
    unknown_from: int | None = None
    """First line of an unbroken run of unknown ones that reaches the end: padding, perhaps."""
    alike: tuple[str, ...] = ()
    """Where nothing could be told apart: the tensors that hold all of its lines."""

    @property
    def names(self) -> list[str]:
        """The reference's tensors that were found, in the order in which they are stored."""
        ordered = sorted(self.parts, key=lambda part: part.lens.offset)
        return list(dict.fromkeys(part.name for part in ordered))

    @property
    def is_complete(self) -> bool:
        """Whether every line was found."""
        return self.num_found == self.num_lines > 0


class ContentIndex:
    """Hashes of the reference's lines.

    Args:
        tensors: Per name the shape, and what reads its rows.
        lengths: Line lengths that will be looked for.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[tuple[int, ...], ReadRows]], lengths: Iterable[int]
    ) -> None:
        self._names = list(tensors)
        self._stacks = [Stack(shape) for shape, _ in tensors.values()]
        self._lines: dict[tuple[int, str, int], Tensor] = {}
        self._sorted: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        wanted = sorted({length for length in lengths if length >= SHORTEST})
        for number, (_, read) in enumerate(tensors.values()):
            stack = self._stacks[number]
            pairs = [
                (way, length)
                for way in (ROWS, COLUMNS)
                for length in wanted
                if length <= stack.length(way)
            ]
            for (way, length), hashes in line_hashes(stack, read, pairs).items():
                self._lines[number, way, length] = hashes

    def match(self, shape: tuple[int, ...], read: ReadRows) -> Match:
        """Find a stored tensor of ``shape``, in whichever way most of its lines are found."""
        stack = Stack(shape)
        ways = {way: stack.length(way) for way in (ROWS, COLUMNS)}
        wanted = [(way, length) for way, length in ways.items() if length >= SHORTEST]
        hashes = line_hashes(stack, read, wanted)
        best: tuple[tuple[int, int], _Search] | None = None
        for mine, theirs in _WAYS:
            if (mine, ways[mine]) not in hashes:
                continue
            lines = hashes[mine, ways[mine]][:, 0]
            search = self._search(lines, theirs, ways[mine], stack, mine)
            score = (search.num_unique * ways[mine], search.num_known * ways[mine])
            if search.num_known and (best is None or score > best[0]):
                best = (score, search)
        if best is None:
            return Match(num_lines=stack.count(ROWS), num_unknown=stack.count(ROWS), unknown_from=0)
        return best[1].match()

    def _search(self, lines: Tensor, way: str, length: int, stack: Stack, mine: str) -> _Search:
        table = self._table(way, length)
        low = torch.searchsorted(table[0], lines)
        high = torch.searchsorted(table[0], lines, right=True)
        return _Search(self, lines, low, high - low, table, way, length, stack, mine)

    def _table(self, way: str, length: int) -> tuple[Tensor, ...]:
        """Return ``hash, tensor, line, segment`` of all lines of a length, sorted by hash."""
        if (way, length) not in self._sorted:
            columns: list[list[Tensor]] = [[], [], [], []]
            for (number, its_way, its_length), hashes in self._lines.items():
                if (its_way, its_length) != (way, length):
                    continue
                lines, segments = hashes.shape
                columns[0].append(hashes.reshape(-1))
                columns[1].append(torch.full((lines * segments,), number))
                columns[2].append(torch.arange(lines).repeat_interleave(segments))
                columns[3].append(torch.arange(segments).repeat(lines))
            joined = [
                torch.cat(column) if column else torch.empty(0, dtype=torch.int64)
                for column in columns
            ]
            order = torch.argsort(joined[0])
            self._sorted[way, length] = tuple(column[order] for column in joined)
        return self._sorted[way, length]

    def hash_at(self, number: int, way: str, length: int, line: int, segment: int) -> int | None:
        """Return the hash of one line; None if there is no such line."""
        hashes = self._lines[number, way, length]
        return int(hashes[line, segment]) if 0 <= line < len(hashes) else None

    def name(self, number: int) -> str:
        """Return the name of a tensor."""
        return self._names[number]

    def stack(self, number: int) -> Stack:
        """Return the shape of a tensor."""
        return self._stacks[number]


_Spot = tuple[int, int, int]
"""Tensor, segment, line."""


@dataclass
class _Search:
    """The lines of one stored tensor, looked up one way."""

    index: ContentIndex
    lines: Tensor
    low: Tensor
    count: Tensor
    table: tuple[Tensor, ...]
    way: str
    length: int
    stack: Stack
    mine: str

    @property
    def num_unique(self) -> int:
        return int((self.count == 1).sum())

    @property
    def num_known(self) -> int:
        return int((self.count > 0).sum())

    def match(self) -> Match:
        """Turn lookups into boxes."""
        spots = self._spots()
        result = Match(num_lines=len(self.lines), num_found=len(spots))
        counts = self.count.tolist()
        result.num_unknown = counts.count(0)
        known = [line for line, count in enumerate(counts) if count]
        if result.num_unknown and known[-1] + 1 + result.num_unknown == len(counts):
            result.unknown_from = known[-1] + 1
        if not spots:
            result.alike = self._alike()
            return result
        for run in _runs(spots, self._place):
            result.parts += self._parts(*run)
        return result

    def _spots(self) -> dict[int, _Spot]:
        """Return where each line is; one that is in several places goes with its neighbour."""
        unique = (self.count == 1).nonzero().flatten()
        rows = self.low[unique]
        spots: dict[int, _Spot] = {}
        for line, number, at, segment in zip(
            unique.tolist(),
            self.table[1][rows].tolist(),
            self.table[2][rows].tolist(),
            self.table[3][rows].tolist(),
            strict=True,
        ):
            spots[line] = (number, segment, at)
        several = (self.count > 1).nonzero().flatten().tolist()
        for step, order in ((1, several), (-1, reversed(several))):
            for line in order:
                neighbour = spots.get(line - step)
                if line in spots or neighbour is None:
                    continue
                number, segment, at = neighbour
                wanted = self.index.hash_at(number, self.way, self.length, at + step, segment)
                if wanted == int(self.lines[line]):
                    spots[line] = (number, segment, at + step)
        return spots

    def _alike(self) -> tuple[str, ...]:
        """Return the tensors that hold all lines, where no line has only one place."""
        common: set[int] | None = None
        for low, count in zip(self.low.tolist(), self.count.tolist(), strict=True):
            holders = set(self.table[1][low : low + count].unique().tolist()) if count else set()
            common = holders if common is None else common & holders
            if not common:
                return ()
        return tuple(self.index.name(number) for number in sorted(common or ()))

    def _place(self, line: int) -> int:
        """Return the position of a line's first element in the stored tensor."""
        if self.mine == ROWS:
            return line * self.stack.columns
        slice_, column = divmod(line, self.stack.columns)
        return slice_ * self.stack.rows * self.stack.columns + column

    def _parts(self, spot: _Spot, place: int, count: int, step: int) -> list[Part]:
        number, segment, line = spot
        stack = self.index.stack(number)
        along = 1 if self.mine == ROWS else self.stack.columns
        first = offsets(stack.length(self.way), self.length)[segment]
        lead = stack.lead if self.way == ROWS else (*stack.lead[:-1], stack.columns)
        found = []
        for flat in flat_boxes(lead, line, line + count):
            starts = tuple(start for start, _ in flat.intervals)
            strides = tuple(step * stride for stride in row_major(lead))
            box = _box(stack, self.way, starts, flat.shape, first, self.length)
            if box is None:
                continue
            lens = Lens(place + step * flat.offset, _strides(stack, self.way, strides, along))
            found.append(Part(self.index.name(number), box, lens))
        return found


def _box(
    stack: Stack,
    way: str,
    starts: tuple[int, ...],
    shape: tuple[int, ...],
    first: int,
    length: int,
) -> Box | None:
    """Return lines and their segment as a box of the tensor; None if merged dims would be cut."""
    if way == COLUMNS:
        if stack.merged > 1:
            return None
        start = (*starts[:-1], first, starts[-1])
        return Box(tuple(0 for _ in start), start, (*shape[:-1], length, shape[-1]))
    if stack.merged == 1:
        start = (*starts, first)
        return Box(tuple(0 for _ in start), start, (*shape, length))
    if length != stack.columns:
        return None
    start = (*starts, *(0 for _ in range(stack.merged)))
    return Box(tuple(0 for _ in start), start, (*shape, *stack.shape[len(stack.lead) :]))


def _strides(stack: Stack, way: str, lines: tuple[int, ...], along: int) -> tuple[int, ...]:
    if way == COLUMNS:
        return (*lines[:-1], along, lines[-1])
    inner = row_major(stack.shape[len(stack.lead) :])
    return (*lines, *(along * stride for stride in inner))


def _runs(
    spots: Mapping[int, _Spot], place: Callable[[int], int]
) -> Iterable[tuple[_Spot, int, int, int]]:
    """Join lines that follow each other in the reference and are equally far apart here.

    Yields:
        ``(first spot, position of its first element here, number of lines, step)``.
    """
    ordered = sorted((spot, place(line)) for line, spot in spots.items())
    at = 0
    while at < len(ordered):
        stop = at + 1
        step = 0
        if stop < len(ordered) and _follows(ordered, at) and ordered[stop][1] > ordered[at][1]:
            step = ordered[stop][1] - ordered[at][1]
            while (
                stop < len(ordered)
                and _follows(ordered, stop - 1)
                and ordered[stop][1] - ordered[stop - 1][1] == step
            ):
                stop += 1
        yield ordered[at][0], ordered[at][1], stop - at, step
        at = stop


def _follows(ordered: Sequence[tuple[_Spot, int]], at: int) -> bool:
    (number, segment, line), _ = ordered[at]
    return ordered[at + 1][0] == (number, segment, line + 1)
