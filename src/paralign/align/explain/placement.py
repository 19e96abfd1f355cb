"""Hypotheses about where values are: right ones, at the wrong place.

Another layer's weights under a layer's name, another rank's shard, or rows in another order keep
every norm and every histogram; only comparing pieces with all other places finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.proof import (
    Held,
    Proof,
    Readable,
    error_left,
    limit_of,
    parts_of,
    proves,
)
from paralign.align.judge import Compared
from paralign.layout import Box, LocalMap, boxes, local_shape

WRONG_LAYER = "wrong_layer"
PERMUTED_SHARDS = "permuted_shards"

_PROBE_ELEMENTS = 4096
_LARGEST_SORTED = 1 << 22
"""Elements of a tensor whose rows are sorted; more would not fit the memory of a comparison."""


@dataclass(frozen=True)
class Relocated:
    """A tensor read at another place: what a piece with ``target`` holds, for one with ``own``."""

    base: Readable
    own: LocalMap
    target: LocalMap

    def fetch(self, box: Box) -> Tensor:
        """Return what lies at the other place for ``box`` of the piece that has the map ``own``."""
        if self.own == self.target:
            return self.base.fetch(box)
        whole = torch.empty(box.shape, dtype=torch.float64)
        for other in boxes(self.target):
            starts = [max(a, b) for a, b in zip(box.local, other.local, strict=True)]
            stops = [
                min(a + n, b + m)
                for a, n, b, m in zip(box.local, box.shape, other.local, other.shape, strict=True)
            ]
            shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
            if any(n <= 0 for n in shape):
                continue
            at = tuple(
                first + start - local
                for first, start, local in zip(other.start, starts, other.local, strict=True)
            )
            into = tuple(
                slice(start - own, start - own + n)
                for start, own, n in zip(starts, box.local, shape, strict=True)
            )
            whole[into] = self.base.fetch(Box(tuple(starts), at, shape))
        return whole


@dataclass(frozen=True)
class Place:
    """Where a piece's values belong."""

    name: str
    state: str | None
    map: LocalMap
    holder: int
    """The rank of the run under test that should hold what is there."""


def prove_misplaced(context: Context, item: Compared) -> Proof | None:
    """Return the proof that every wrong piece is another part of the reference."""
    if limit_of(item) is None:
        return None
    wrong = [
        piece
        for pieces in item.side.replicas.values()
        for piece in pieces
        if piece.rank in item.row.ranks_off
    ]
    found: list[tuple[Held, Place, float]] = []
    for piece in wrong:
        place = _find(context, item, piece)
        if place is None:
            return None
        found.append((piece, *place))
    if not found or _is_degenerate(item):
        return None
    left = max(error for _, _, error in found)
    if not proves(item, left):
        return None
    layers = {place.name for _, place, _ in found} - {item.row.name}
    if layers:
        return _wrong_layer(item, found, left)
    return _permuted(context, item, found, left)


def _is_degenerate(item: Compared) -> bool:
    """A constant tensor (norm weights at start) equals every other one: it proves nothing."""
    first = item.base.fetch(next(iter(parts_of(next(iter(item.side.replicas.values()))[0]))))
    return bool((first == first.reshape(-1)[0]).all()) and first.numel() > 1


def _find(context: Context, item: Compared, piece: Held) -> tuple[Place, float] | None:
    """Return the place whose reference values ``piece`` holds."""
    for place, base in _places(context, item, piece):
        source = Relocated(base, piece.map, place.map)
        if not _probe(piece, source, limit_of(item) or 0.0):
            continue
        norm = math.hypot(
            *(float(torch.linalg.vector_norm(source.fetch(box))) for box in parts_of(piece))
        )
        left = error_left([piece], source, norm, stop_at=limit_of(item) or 0.0)
        if left < math.inf:
            return place, left
    return None


def _places(context: Context, item: Compared, piece: Held) -> Iterator[tuple[Place, Readable]]:
    """Yield every other place of the same shape: the tensor's own first, then other tensors'."""
    shape = local_shape(piece.map)
    for other in [item, *_alike(context, item)]:
        for held, pieces in other.side.replicas.items():
            here = other is item and held == piece.map
            if not here and local_shape(held) == shape:
                name, state = other.row.name, other.row.state
                yield Place(name, state, held, pieces[0].rank), other.base


def _alike(context: Context, item: Compared) -> list[Compared]:
    return [
        other
        for other in context.judged(item.moment.kind, item.moment.step)
        if other is not item
        and other.row.state == item.row.state
        and other.base.shape == item.base.shape
    ]


def _probe(piece: Held, base: Readable, limit: float) -> bool:
    """Whether the first few elements are alike: cheap, and wrong places end here."""
    box = next(next(parts_of(piece)).split(_PROBE_ELEMENTS), None) if local_numel(piece) else None
    if box is None:
        return False
    x, r = piece.read(box), base.fetch(box)
    size = float(torch.linalg.vector_norm(r))
    difference = float(torch.linalg.vector_norm(x - r))
    # A part of the tensor may be relatively worse than all of it; the full check decides.
    return difference <= max(10.0 * limit, 1e-300) * size or difference == 0.0


def local_numel(piece: Held) -> int:
    """Return how many elements a piece holds."""
    return math.prod(local_shape(piece.map))


def _wrong_layer(item: Compared, found: Sequence[tuple[Held, Place, float]], left: float) -> Proof:
    holds: dict[str, list[int]] = {}
    for piece, place, _ in found:
        holds.setdefault(place.name, []).append(piece.rank)
    told = "; ".join(f"{name} on rank {_ranks(ranks)}" for name, ranks in sorted(holds.items()))
    return Proof(
        WRONG_LAYER,
        left,
        key=(WRONG_LAYER,),
        detail={"holds": {name: sorted(ranks) for name, ranks in sorted(holds.items())}},
        text=f"Under the name {item.row.name} lies what the reference calls {told}. Derive the "
        "layer's number from the pipeline coordinate alone (pp_rank x layers per stage), or pass "
        "global names.",
    )


def _permuted(
    context: Context,
    item: Compared,
    found: Sequence[tuple[Held, Place, float]],
    left: float,
) -> Proof:
    pairs = {piece.rank: place.holder for piece, place, _ in found}
    first, other = next(iter(pairs.items()))
    axes = context.mesh.axes_of([first, other])
    told = ", ".join(f"rank {rank} holds the part of rank {at}" for rank, at in pairs.items())
    return Proof(
        PERMUTED_SHARDS,
        left,
        tuple(context.mesh.named(axes)),
        key=(PERMUTED_SHARDS, tuple(pairs.items())),
        detail={"pairs": {str(rank): at for rank, at in pairs.items()}},
        text=f"The values are right but in the wrong shards: {told}. Cut the tensor in the order "
        f"of the coordinates on {' x '.join(axes) or 'the mesh'}.",
    )


def prove_permuted_rows(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the tensor is the reference with the slices of one dim reordered."""
    limit = limit_of(item)
    total = math.prod(item.base.shape)
    if limit is None or not 1 < total <= _LARGEST_SORTED or item.measured.replicas_differ:
        return None
    everything = Box(
        tuple(0 for _ in item.base.shape), tuple(0 for _ in item.base.shape), item.base.shape
    )
    x, r = item.side.fetch(everything), item.base.fetch(everything)
    norm = float(torch.linalg.vector_norm(r))
    for dim, size in enumerate(item.base.shape):
        if size < 2 or not norm > 0.0:
            continue
        order = matching_order(
            x.transpose(0, dim).reshape(size, -1), r.transpose(0, dim).reshape(size, -1)
        )
        moved = r.index_select(dim, order)
        left = float(torch.linalg.vector_norm(x - moved)) / norm
        if proves(item, left) and not torch.equal(order, torch.arange(size)):
            axes = _cutting_axes(context, item, dim)
            shown = [int(at) for at in order[:16]]
            return Proof(
                PERMUTED_SHARDS,
                left,
                tuple(context.mesh.named(axes)),
                key=(PERMUTED_SHARDS, dim, axes),
                detail={"dim": dim, "order": shown},
                text=f"The slices of dim {dim} are right but in another order: place i holds the "
                f"reference's slice {shown}{'...' if size > 16 else ''}[i]. Cut each segment of a "
                "fused weight by itself, and put sharded pieces back in the order they were cut.",
            )
    return None


def matching_order(x: Tensor, r: Tensor) -> Tensor:
    """Return which slice of ``r`` each slice of ``x`` is, if they are the same slices at all."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(x.shape[1], generator=generator, dtype=torch.float64)
    order_x, order_r = torch.argsort(x @ direction), torch.argsort(r @ direction)
    order = torch.empty_like(order_x)
    order[order_x] = order_r
    return order


def _cutting_axes(context: Context, item: Compared, dim: int) -> tuple[str, ...]:
    """Return the axes that shard ``dim``."""
    holders: dict[object, int] = {}
    for held, pieces in item.side.replicas.items():
        holders.setdefault(held[dim], pieces[0].rank)
    return context.mesh.axes_of(list(holders.values()))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
