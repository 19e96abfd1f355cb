"""Bring together what two runs' modules returned, token by token.

Every rank holds the rows and positions of its micro-batches. The token map says which of the global
batch these are; so each output becomes a global tensor ``[rows, positions, ...]`` in pieces, like a
parameter's gradient, whichever way the batch was cut and in whichever order its dims are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from paralign.align.lens import Lens, row_major
from paralign.align.pair import Piece, Quantity, Term
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.token_map import Held, Key, spans_of
from paralign.align.trace import RankIndex
from paralign.align.trace_reader import TraceReader
from paralign.layout import LocalMap, Span, boxes


@dataclass(frozen=True)
class TokenDims:
    """Which dims of an output count rows and positions."""

    rows: int
    positions: int
    degree: int = 1
    """Ranks over which the positions are cut once more (sequence parallel)."""

    @property
    def is_flat(self) -> bool:
        """Whether one dim counts both."""
        return self.rows == self.positions


@dataclass(frozen=True)
class Found:
    """A quantity and how sure its place is."""

    quantity: Quantity
    is_guess: bool
    """Some piece was placed by the size of a dim alone, so a difference proves nothing."""
    uncovered: int
    """Tokens of the global batch that no piece holds."""


class StepOutputs:
    """One run's module outputs and their gradients at one step.

    Args:
        trace: The run.
        step: The step.
        shape: Rows and positions of the global batch.
        held: What every micro-batch holds of it.
        rename: Rank and module -> the reference's name of it; None: it has the same.
    """

    def __init__(
        self,
        trace: TraceReader,
        step: int,
        shape: tuple[int, int],
        held: Mapping[Key, Held],
        rename: Callable[[int, str], str] | None = None,
    ) -> None:
        self._trace = trace
        self._shape = shape
        self._held = held
        self._known_cover: dict[frozenset[LocalMap], int] = {}
        self._entries: dict[tuple[str, str], list[tuple[int, TensorEntry]]] = {}
        for index in trace.ranks:
            for entry in index.tensors:
                if entry.step == step and entry.micro_batch is not None:
                    name = entry.name
                    if rename is not None and entry.kind != Kind.INPUT:
                        module, bracket, place = name.partition("[")
                        name = rename(index.rank, module) + bracket + place
                    name = f"{name}#{entry.call}" if entry.call else name
                    self._entries.setdefault((entry.kind, name), []).append((index.rank, entry))

    def names(self, kind: str) -> list[str]:
        """Names of a kind in the order of execution: that of the rank that did most."""
        first: dict[str, tuple[int, int]] = {}
        for (entry_kind, name), found in self._entries.items():
            if entry_kind == kind:
                first[name] = min((rank, entry.order or 0) for rank, entry in found)
        return sorted(first, key=lambda name: first[name])

    def possible_dims(self, kind: str, name: str) -> list[tuple[int, int]]:
        """Return which dims may count rows and positions in all of a run's pieces."""
        found: list[tuple[int, int]] | None = None
        for rank, entry in self._entries.get((kind, name), []):
            here = [(dims.rows, dims.positions) for dims in self._possible_dims(rank, entry)]
            found = here if found is None else [dims for dims in found if dims in here]
        return found or []

    def rest_of(
        self, kind: str, name: str, prefer: tuple[int, int] | None = None
    ) -> tuple[int, ...] | None:
        """Return the shape without rows and positions; None if it is not known."""
        for rank, entry in self._entries.get((kind, name), []):
            dims = self._dims(rank, entry, prefer)
            if dims is not None:
                return _rest(entry.shape, dims)
        return None

    def is_counted(self, kind: str, name: str) -> bool:
        """Whether these tensors were not kept, because their rows are a router's choice."""
        found = self._entries.get((kind, name), [])
        return bool(found) and all(entry.file is None for _, entry in found)

    def quantity(
        self,
        kind: str,
        name: str,
        rest: tuple[int, ...],
        prefer: tuple[int, int] | None = None,
    ) -> Found | str:
        """Return the global tensor, or why its pieces cannot be placed.

        Args:
            kind: The kind of tensor.
            name: The module's name, with its place in a tuple and its call.
            rest: Shape without rows and positions, in the run that holds whole tensors.
            prefer: The dims that count rows and positions, where a shape allows several.
        """
        pieces: list[Piece] = []
        is_guess = False
        for rank, entry in self._entries.get((kind, name), []):
            dims = self._dims(rank, entry, prefer)
            if entry.file is None:
                return "its rows are chosen by a router, so they were counted only"
            if dims is None:
                return f"shape {list(entry.shape)} has no dims for rows and positions"
            cut = _cut_of(_rest(entry.shape, dims), rest, self._trace.ranks[rank])
            if cut is None:
                return f"shape {list(entry.shape)}, but {list(rest)} behind rows and positions"
            is_guess |= dims.degree > 1 or bool(cut)
            pieces += self._pieces(rank, entry, dims, cut)
        shape = (*self._shape, *rest)
        whole = Quantity(shape, tuple(self._summed(pieces)), ())
        return Found(whole, is_guess, self._uncovered(whole))

    def _dims(
        self, rank: int, entry: TensorEntry, prefer: tuple[int, int] | None
    ) -> TokenDims | None:
        found = self._possible_dims(rank, entry)
        likely = [dims for dims in found if (dims.rows, dims.positions) == prefer]
        return next(iter(likely + found), None)

    def _possible_dims(self, rank: int, entry: TensorEntry) -> list[TokenDims]:
        held = self._held.get((rank, entry.micro_batch or 0))
        if held is None:
            return []
        if entry.token_dims is not None:
            return [TokenDims(*entry.token_dims)]
        sizes = {len(ranks) for ranks in self._trace.ranks[rank].axes.values()}
        return token_dims(entry.shape, *held.shape, degrees=sorted(sizes - {1}))

    def _pieces(
        self, rank: int, entry: TensorEntry, dims: TokenDims, cut: Mapping[int, tuple[int, int]]
    ) -> list[Piece]:
        held = self._held[rank, entry.micro_batch or 0]
        local = entry.held_shape
        strides = row_major(local)
        others = [dim for dim in range(len(local)) if dim not in (dims.rows, dims.positions)]
        tail = tuple(strides[dim] for dim in others)
        ends = tuple(
            _shifted(entry.map[dim], cut[number][0]) if number in cut else entry.map[dim]
            for number, dim in enumerate(others)
        )
        if dims.is_flat:
            length = held.shape[1]
            lens = Lens(0, (strides[0] * length, strides[0], *tail))
            own_rows = spans_of(range(held.shape[0]))
            own_positions = spans_of(range(length))
        else:
            lens = Lens(0, (strides[dims.rows], strides[dims.positions], *tail))
            own_rows = entry.map[dims.rows]
            own_positions = entry.map[dims.positions]
            if dims.degree > 1:
                at = _coordinate(self._trace.ranks[rank], dims.degree)
                own_positions = _shifted(own_positions, at * entry.shape[dims.positions])
        pieces = []
        for block in held.blocks:
            rows = compose(own_rows, block.rows)
            positions = compose(own_positions, block.positions)
            if rows and positions:
                place: LocalMap = (rows, positions, *ends)
                pieces.append(Piece(rank, place, (Term(1.0, entry, lens),), self._trace))
        return pieces

    def _summed(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Make the summands of a pending sum one piece per group."""
        alone = [piece for piece in pieces if not piece.terms[0].entry.partial_over]
        groups: dict[tuple[frozenset[int], LocalMap], list[Piece]] = {}
        for piece in pieces:
            axes = piece.terms[0].entry.partial_over
            if axes:
                peers = self._peers(piece.rank, axes)
                groups.setdefault((peers, piece.map), []).append(piece)
        for members in groups.values():
            entry = members[0].terms[0].entry
            weight = 1.0 / len(members) if entry.partial_op == "avg" else 1.0
            terms = tuple(piece.terms[0]._replace(weight=weight) for piece in members)
            alone.append(replace(members[0], terms=terms))
        return alone

    def _peers(self, rank: int, axes: Sequence[str]) -> frozenset[int]:
        reached, queue = {rank}, [rank]
        while queue:
            index = self._trace.ranks[queue.pop()]
            new = {peer for axis in axes for peer in index.axes.get(axis, [])} - reached
            reached |= new
            queue += new
        return frozenset(reached)

    def _uncovered(self, quantity: Quantity) -> int:
        parts = frozenset(held[:2] for held in quantity.replicas)
        if parts not in self._known_cover:
            cells = torch.zeros(self._shape, dtype=torch.bool)
            for held in parts:
                for box in boxes(held):
                    row, position = box.start
                    cells[row : row + box.shape[0], position : position + box.shape[1]] = True
            self._known_cover[parts] = int((~cells).sum())
        return self._known_cover[parts]


def token_dims(
    shape: Sequence[int], rows: int, positions: int, *, degrees: Sequence[int] = ()
) -> list[TokenDims]:
    """Say which dims of an output may count its micro-batch's rows and positions.

    Usually one pair does; several where other dims have the same sizes, likelier ones first.

    Args:
        shape: Shape of the output.
        rows: Rows of the micro-batch.
        positions: Positions of the micro-batch.
        degrees: Sizes of axes that may cut the positions further.
    """
    for degree in (1, *(degree for degree in degrees if positions % degree == 0)):
        length = positions // degree
        found = []
        if tuple(shape[:2]) == (rows, length):
            found.append(TokenDims(0, 1, degree))
        if tuple(shape[:2]) == (length, rows) and rows != length:
            found.append(TokenDims(1, 0, degree))
        if shape and shape[0] == rows:
            behind = [dim for dim in range(2, len(shape) - 1) if shape[dim] == length]
            found += [TokenDims(0, dim, degree) for dim in behind]
        if found:
            return found
    if len(shape) in (1, 2) and shape[0] == rows * positions:
        return [TokenDims(0, 0)]
    return []


def compose(inner: Sequence[Span], outer: Sequence[Span]) -> tuple[Span, ...]:
    """Return where local indices lie globally: ``inner`` leads to what ``outer`` starts from."""
    found = []
    for (start, _), (left, right) in inner:
        for (first, last), (at, _) in outer:
            low, high = max(left, first), min(right, last)
            if low < high:
                shift, place = low - left + start, low - first + at
                found.append(Span((shift, shift + high - low), (place, place + high - low)))
    return tuple(found)


def _rest(shape: Sequence[int], dims: TokenDims) -> tuple[int, ...]:
    return tuple(n for dim, n in enumerate(shape) if dim not in (dims.rows, dims.positions))


def _cut_of(
    own: tuple[int, ...], whole: tuple[int, ...], index: RankIndex
) -> dict[int, tuple[int, int]] | None:
    """Return offset and size of the dims of which this rank holds a slice; None if none fits."""
    if len(own) != len(whole):
        return None
    cut: dict[int, tuple[int, int]] = {}
    for dim, (here, there) in enumerate(zip(own, whole, strict=True)):
        if here == there:
            continue
        if not here or there % here or not _has_axis(index, there // here):
            return None
        cut[dim] = (_coordinate(index, there // here) * here, here)
    return cut


def _has_axis(index: RankIndex, size: int) -> bool:
    return any(len(ranks) == size for ranks in index.axes.values())


def _coordinate(index: RankIndex, size: int) -> int:
    """Return this rank's place on an axis of a size; tensor parallelism is the likeliest."""
    axes = [axis for axis, ranks in index.axes.items() if len(ranks) == size]
    axes.sort(key=lambda axis: not axis.startswith("tp"))
    return index.coordinates.get(axes[0], 0)


def _shifted(spans: Sequence[Span], offset: int) -> tuple[Span, ...]:
    return tuple(Span(local, (start + offset, stop + offset)) for local, (start, stop) in spans)
