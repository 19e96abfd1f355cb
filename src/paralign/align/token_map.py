"""Which tokens of the global batch each micro-batch of each rank holds.

A rank's rows are looked up in the table of all rows, token by token. That covers every way to cut a
batch: over data-parallel ranks and micro-batches, in sequence slices, zig-zag, packed documents::

    table row 5     a b c d e f g h          local row of cp rank 0 in zig-zag: a b g h
    positions held  0 1         6 7          (local 0:2 = global 0:2), (local 2:4 = global 6:8)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paralign.align.tensor_entry import TOKEN_KINDS, Kind, TensorEntry
from paralign.align.trace import RankIndex
from paralign.align.trace_reader import TraceReader
from paralign.layout import Span, boxes

PADDING = -1

# A wrong start is noticed at its first tokens; the whole row is compared only after these.
_FIRST_TOKENS = 8

Inputs = Mapping[str, Tensor]
"""What a micro-batch was fed: ``tokens``, maybe ``labels`` and ``positions``, each ``[b, s]``."""

Key = tuple[int, int]
"""Rank and micro-batch."""

Samples = tuple[int, ...]
"""Sample number of every row of a micro-batch."""

_Told = TypeVar("_Told")


@dataclass(frozen=True)
class Block:
    """Local rows that hold the same positions, as intervals of rows and of positions."""

    rows: tuple[Span, ...]
    positions: tuple[Span, ...]


@dataclass(frozen=True)
class Held:
    """What one micro-batch holds of the global batch."""

    shape: tuple[int, int]
    """Local rows and positions."""
    blocks: tuple[Block, ...]
    lost: tuple[int, ...]
    """Local rows that are not in the table."""


@dataclass(frozen=True)
class TokenTable:
    """All distinct rows of the global batch of a step, ``[rows, positions]``."""

    tokens: Tensor
    samples: dict[int, int]
    """Sample number -> row, where the run said them."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and positions of the global batch."""
        return int(self.tokens.shape[0]), int(self.tokens.shape[1])


def told_inputs(trace: TraceReader, step: int) -> dict[Key, Inputs]:
    """Return what every rank was fed as it was recorded, by rank and micro-batch.

    Where a rank told all micro-batches at once, they are the first one's.
    """
    return {
        (index.rank, micro_batch): inputs
        for index in trace.ranks
        for micro_batch, inputs in _own_inputs(trace, index, step)[0].items()
    }


def step_inputs(trace: TraceReader, step: int) -> dict[Key, Inputs]:
    """Return what every rank was fed, by rank and micro-batch.

    A rank of a later pipeline stage that sees no tokens gets those of its first stage.
    """
    found: dict[Key, Inputs] = {}
    for index in trace.ranks:
        for micro_batch, inputs in _in_micro_batches(*_own_inputs(trace, index, step)).items():
            found[index.rank, micro_batch] = inputs
    return _handed_on(trace, found)


def step_samples(trace: TraceReader, step: int) -> dict[Key, Samples]:
    """Return the sample numbers that ranks gave of their rows, by rank and micro-batch.

    A rank of a later pipeline stage that was told none gets those of its first stage.
    """
    found = {
        (index.rank, tokens.micro_batch): tokens.samples
        for index in trace.ranks
        for tokens in index.token_maps
        if tokens.step == step and tokens.samples is not None
    }
    return _handed_on(trace, found)


def _handed_on(trace: TraceReader, told: dict[Key, _Told]) -> dict[Key, _Told]:
    """Give what a pipeline's first stage was told to its later stages, which were told nothing."""
    found = dict(told)
    knowing = {rank for rank, _ in told}
    for index in trace.ranks:
        peers = [rank for rank in index.axes.get("pp", []) if rank in knowing]
        if index.rank not in knowing and peers:
            found |= {
                (index.rank, micro_batch): value
                for (rank, micro_batch), value in told.items()
                if rank == peers[0]
            }
    return found


def token_table(inputs: Mapping[Key, Inputs], samples: Mapping[Key, Samples]) -> TokenTable | None:
    """Collect the distinct rows of a run; None if it does not say enough.

    Its micro-batches hold whole rows; or they tell of all their pieces which sample and which
    positions they are.
    """
    fed = {key: given for key, given in inputs.items() if "tokens" in given}
    if not fed:
        return None
    if all(key in samples and _are_places(given.get("positions")) for key, given in fed.items()):
        return _told_table(fed, samples)
    length = max(int(given["tokens"].shape[1]) for given in fed.values())
    distinct: dict[tuple[int, ...], int] = {}
    numbers: dict[int, int] = {}
    for key, given in fed.items():
        if int(given["tokens"].shape[1]) != length:
            continue
        for row, content in enumerate(given["tokens"].tolist()):
            at = distinct.setdefault(tuple(content), len(distinct))
            if key in samples:
                numbers[samples[key][row]] = at
    return TokenTable(torch.tensor(list(distinct), dtype=torch.int64).reshape(-1, length), numbers)


def _told_table(fed: Mapping[Key, Inputs], samples: Mapping[Key, Samples]) -> TokenTable:
    known = sorted({sample for key in fed for sample in samples[key] if sample >= 0})
    numbers = {sample: row for row, sample in enumerate(known)}
    length = 1 + max(int(given["positions"].max()) for given in fed.values())
    table = torch.full((len(known), length), PADDING, dtype=torch.int64)
    for key, given in fed.items():
        for row, sample in enumerate(samples[key]):
            if sample >= 0:
                table[numbers[sample], given["positions"][row]] = given["tokens"][row].long()
    return TokenTable(table, numbers)


def find_tokens(
    fed: Inputs,
    table: TokenTable,
    index: RankIndex,
    samples: Samples | None = None,
    *,
    rows: Sequence[int] | None = None,
) -> Held:
    """Look up the rows of a micro-batch in the table.

    Args:
        fed: What it was fed.
        table: The rows of the global batch.
        index: Of the rank; its coordinates decide between slices of equal content.
        samples: Sample numbers of its rows, which decide between rows of equal content.
        rows: The table's rows that they are, where others know (``PADDING``: they do not); decide
            likewise.
    """
    expected = list(rows or [table.samples.get(sample, PADDING) for sample in samples or ()])
    tokens = fed["tokens"].to(torch.int64)
    count, length = int(tokens.shape[0]), int(tokens.shape[1])
    row_at: list[int] = [PADDING] * count
    at: list[Tensor | None] = [None] * count
    # A slice of blanks is found in many places: the row that was told decides over the place, too.
    for as_told in (True, False) if expected else (False,):
        for candidate in _candidates(fed, table, index):
            open_rows = [row for row in range(count) if row_at[row] == PADDING]
            if not open_rows:
                break
            for row, found in _match(tokens, candidate, open_rows, table, expected):
                if not as_told or found == expected[row]:
                    row_at[row], at[row] = found, candidate[row]
    lost = tuple(row for row in range(count) if row_at[row] == PADDING)
    return Held((count, length), tuple(_blocks(row_at, at, table.shape[1])), lost)


def _own_inputs(trace: TraceReader, index: RankIndex, step: int) -> tuple[dict[int, Inputs], int]:
    """Return a rank's inputs by micro-batch, and its number of micro-batches."""
    entries = [entry for entry in index.tensors if entry.step == step and entry.kind in TOKEN_KINDS]
    fed: dict[int, dict[str, Tensor]] = {}
    for entry in entries:
        if entry.kind == Kind.INPUT and entry.file is not None:
            fed.setdefault(entry.micro_batch or 0, {})[entry.name] = _read(trace, entry)
    return dict(fed), 1 + max((entry.micro_batch or 0 for entry in entries), default=0)


def _in_micro_batches(fed: dict[int, Inputs], count: int) -> dict[int, Inputs]:
    """Cut inputs that were told at once, as torch's pipelining does."""
    if len(fed) != 1 or count == 1:
        return fed
    parts = {name: tensor.chunk(count) for name, tensor in fed.get(0, {}).items()}
    if not all(len(chunks) == count for chunks in parts.values()):
        return fed
    return {
        number: {name: chunks[number] for name, chunks in parts.items()} for number in range(count)
    }


def _read(trace: TraceReader, entry: TensorEntry) -> Tensor:
    [box] = boxes(entry.map)
    return trace.read(entry, box)


def _candidates(fed: Inputs, table: TokenTable, index: RankIndex) -> Iterator[Tensor]:
    """Yield positions ``[b, s]`` that the micro-batch may hold, the likeliest first."""
    tokens = fed["tokens"]
    rows, length = int(tokens.shape[0]), int(tokens.shape[1])
    total = table.shape[1]
    told = fed.get("positions")
    if told is not None and _are_places(told):
        yield told.to(torch.int64)
    if length > total:
        return
    seen: set[tuple[int, ...]] = set()
    for places in [*_usual(length, total, index), *_search(tokens, table)]:
        key = tuple(places)
        if key not in seen:
            seen.add(key)
            yield torch.tensor(places).expand(rows, -1)


def _usual(length: int, total: int, index: RankIndex) -> Iterator[list[int]]:
    """Yield the usual cuts of a sequence over ranks: whole, slices, zig-zag, round-robin."""
    if length == 0 or total % length:
        return
    degree = total // length
    axes = [a for a, ranks in index.axes.items() if len(ranks) == degree and a in index.coordinates]
    axes.sort(key=lambda axis: not axis.startswith(("cp", "sp")))  # the likelier to cut sequences
    own = [index.coordinates[axis] for axis in axes]
    order = list(dict.fromkeys([*own, *range(degree)]))
    for number in order:
        yield list(range(number * length, (number + 1) * length))
    half, rest = divmod(length, 2)
    if rest == 0 and degree > 1:
        for number in order:
            mirror = 2 * degree - 1 - number
            yield [
                *range(number * half, (number + 1) * half),
                *range(mirror * half, (mirror + 1) * half),
            ]
    if degree > 1:
        for number in order:
            yield list(range(number, total, degree))


def _search(tokens: Tensor, table: TokenTable) -> Iterator[list[int]]:
    """Yield every place where the first row could begin as one run of tokens."""
    length, total = int(tokens.shape[1]), table.shape[1]
    if not len(tokens):
        return
    starts = total - length + 1
    matches = torch.ones(table.shape[0], starts, dtype=torch.bool)
    for offset in range(min(_FIRST_TOKENS, length)):
        matches &= table.tokens[:, offset : offset + starts] == tokens[0, offset]
    for start in matches.any(dim=0).nonzero().flatten().tolist():
        yield list(range(start, start + length))


def _are_places(positions: Tensor | None) -> bool:
    """Whether positions count along the whole row; packed documents start again in each."""
    return positions is not None and all(len(set(row)) == len(row) for row in positions.tolist())


def _match(
    tokens: Tensor,
    places: Tensor,
    rows: Sequence[int],
    table: TokenTable,
    expected: Sequence[int],
) -> Iterator[tuple[int, int]]:
    """Yield (local row, table row) for rows found at ``places``; beyond the table is padding."""
    known: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    previous = PADDING
    for row in rows:
        inside = (places[row] >= 0) & (places[row] < table.shape[1])
        at = places[row][inside]
        if not len(at):
            continue
        key = tuple(at.tolist())
        if key not in known:
            known[key] = {}
            for number, content in enumerate(table.tokens[:, at].tolist()):
                known[key].setdefault(tuple(content), []).append(number)
        found = known[key].get(tuple(tokens[row][inside].tolist()), [])
        if found:
            # Rows that agree in this slice: neighbours in the table are neighbours here.
            likely = [*expected[row : row + 1], previous + 1]
            previous = next((number for number in likely if number in found), found[0])
            yield row, previous


def _blocks(row_at: Sequence[int], at: Sequence[Tensor | None], total: int) -> Iterator[Block]:
    """Join neighbouring rows that hold the same positions."""
    first = 0
    while first < len(row_at):
        places = at[first]
        stop = first + 1
        if places is None:
            first = stop
            continue
        while stop < len(row_at) and _same(at[stop], places):
            stop += 1
        yield Block(
            spans_of([*[PADDING] * first, *row_at[first:stop]]),
            spans_of([place if place < total else PADDING for place in places.tolist()]),
        )
        first = stop


def _same(places: Tensor | None, other: Tensor) -> bool:
    return places is not None and torch.equal(places, other)


def spans_of(places: Sequence[int]) -> tuple[Span, ...]:
    """Return where each local index lies globally as intervals; negative places are left out."""
    spans: list[Span] = []
    for local, place in enumerate(places):
        if place < 0:
            continue
        if spans and spans[-1].local[1] == local and spans[-1].global_[1] == place:
            last = spans.pop()
            spans.append(Span((last.local[0], local + 1), (last.global_[0], place + 1)))
        else:
            spans.append(Span((local, local + 1), (place, place + 1)))
    return tuple(spans)
