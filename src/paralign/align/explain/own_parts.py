"""Hypotheses about an output that tensor parallelism cut: whose part of it a rank went on with.

A row-parallel layer multiplies a rank's own input features and sums over ranks. Without the sum,
every token's output is a mixture of the columns that the rank holds, and of no others::

    y = W[:, own] x[own]      lies in the space of W[:, own], which is narrower than the stream

Where slices of the sequence are gathered, or words are looked up by the rank that has them, what is
wrong has the pattern of those slices and words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.placement import PERMUTED_SHARDS
from paralign.align.explain.proof import Held, Proof, limit_of, parts_of, proves
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.judge import Compared
from paralign.align.pair import Moment, Quantity
from paralign.align.tensor_entry import TensorEntry
from paralign.align.trace import Kind
from paralign.layout import Box, LocalMap

_RANK = 1e-9  # singular values below this share of the largest span nothing


def prove_own_part(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ranks go on with what their own columns of the weight make."""
    weight = _weight_of(context, item)
    own = _cut(context, item, dim=1)
    limit = limit_of(item)
    if weight is None or limit is None or len(own) < 2 or weight.shape[0] != item.base.shape[-1]:
        return None
    whole = all_of(weight)
    bias = parameter_of(context, item, "bias")
    shift = torch.zeros(()) if bias is None else all_of(bias)
    spaces: dict[tuple[int, int], Tensor] = {}
    error = norm = 0.0
    for piece in _pieces(item):
        columns = own.get(piece.rank)
        if columns is None:
            return None
        if columns not in spaces:
            spaces[columns] = _space(whole[:, slice(*columns)])
        for box in parts_of(piece):
            x = piece.read(box)
            if x.shape[-1] != whole.shape[0] or spaces[columns].shape[1] >= whole.shape[0]:
                return None  # not a whole token, or these columns make everything
            # The bias is added after the sum, or it is missing with it.
            rest = min(_outside(x - shift, spaces[columns]), _outside(x, spaces[columns]))
            error = math.hypot(error, rest)
            norm = math.hypot(norm, float(torch.linalg.vector_norm(x)))
        if not error <= limit * max(norm, item.measured.total.base):
            return None
    left = error / norm if norm else math.inf
    if not proves(item, left):
        return None
    axes = _axes(context, own)
    return Proof(
        MISSING_REDUCTION,
        left,
        tuple(context.mesh.named(axes)),
        key=(MISSING_REDUCTION, "own columns"),
        detail={"columns": min(stop - start for start, stop in spaces), "of": int(whole.shape[1])},
        text="Every token is a mixture of the columns of the weight that its rank holds, and of no "
        "others: it is the rank's own part. Sum it over "
        f"{' x '.join(axes)}.",
    )


def prove_other_slices(context: Context, item: Compared) -> Proof | None:
    """Return the proof that slices of the sequence are put together in another order."""
    limit, shape = limit_of(item), item.base.shape
    if limit is None or len(shape) < 3 or not item.measured.total.base > 0.0:
        return None
    for axis in context.mesh.live:
        degree = context.mesh.sizes[axis]
        if axis == "pp" or shape[1] % degree:
            continue
        left = _left_reordered(item, degree, limit)
        if left is not None and proves(item, left):
            return Proof(
                PERMUTED_SHARDS,
                left,
                tuple(context.mesh.named((axis,))),
                key=(PERMUTED_SHARDS, "slices", axis),
                detail={"slices": degree},
                text=f"Each of {degree} slices of the sequence is right for another one: what the "
                f"ranks of {axis} hold is put together in another order. Gather in the order of "
                "their coordinates.",
            )
    return None


def _left_reordered(item: Compared, degree: int, limit: float) -> float | None:
    length = item.base.shape[1] // degree
    error, moved = 0.0, 0
    for piece in _pieces(item):
        for box in parts_of(piece):
            if box.start[1] % length or box.shape[1] % length:
                return None
            for at in range(0, box.shape[1], length):
                place = Box(
                    (box.local[0], box.local[1] + at, *box.local[2:]),
                    (box.start[0], box.start[1] + at, *box.start[2:]),
                    (box.shape[0], length, *box.shape[2:]),
                )
                x = piece.read(place)
                size = float(torch.linalg.vector_norm(x))
                own = place.start[1] // length
                for other in (own, *(n for n in range(degree) if n != own)):
                    start = (place.start[0], other * length, *place.start[2:])
                    due = item.base.fetch(Box(place.local, start, place.shape))
                    rest = float(torch.linalg.vector_norm(x - due))
                    if rest <= limit * size:
                        moved += other != own
                        error = math.hypot(error, rest)
                        break
                else:
                    return None
    return error / item.measured.total.base if moved else None


def prove_lost_words(context: Context, item: Compared) -> Proof | None:
    """Return the proof that an embedding is right but for some words, which it makes zero."""
    limit = limit_of(item)
    own = _cut(context, item, dim=0)
    tokens = tokens_of(context, item.moment.step)
    if tokens is None or limit is None or len(own) < 2 or len(item.base.shape) != 3:
        return None
    if tuple(tokens.shape) != tuple(item.base.shape[:2]):
        return None
    lost: set[int] = set()
    kept: set[int] = set()
    error = 0.0
    for piece in _pieces(item):
        for box in parts_of(piece):
            if box.shape[2] != item.base.shape[2]:
                return None
            x, r = piece.read(box), item.base.fetch(box)
            rows, positions = (
                slice(a, a + n) for a, n in zip(box.start[:2], box.shape[:2], strict=True)
            )
            words = tokens[rows, positions]
            is_lost = (x == 0).all(-1) & (r != 0).any(-1)
            error = math.hypot(error, float(torch.linalg.vector_norm((x - r)[~is_lost])))
            lost |= set(words[is_lost].tolist())
            kept |= set(words[~is_lost].tolist())
    left = error / item.measured.total.base if item.measured.total.base else math.inf
    if not lost or lost & kept or not proves(item, left):
        return None
    axes = _axes(context, own)
    shown = ", ".join(map(str, sorted(lost)[:8]))
    return Proof(
        MISSING_CONTRIBUTION,
        left,
        tuple(context.mesh.named(axes)),
        key=(MISSING_CONTRIBUTION, "words"),
        detail={"words": len(lost)},
        text=f"It is right but for {len(lost)} words ({shown}), which are zero everywhere: no "
        f"rank of {' x '.join(axes)} takes them for its own. Compare the bounds of each rank's "
        "part of the vocabulary.",
    )


def tokens_of(context: Context, step: int) -> Tensor | None:
    """Return the tokens of the global batch, ``[rows, positions]``."""
    for item in context.judged(Kind.INPUT, step):
        if item.row.name == "tokens":
            return all_of(item.base).long()
    return None


def _pieces(item: Compared) -> list[Held]:
    return [piece for pieces in item.side.replicas.values() for piece in pieces]


def _weight_of(context: Context, item: Compared) -> Quantity | None:
    weight = parameter_of(context, item, "weight")
    return weight if weight is not None and len(weight.shape) == 2 else None


def parameter_of(context: Context, item: Compared, leaf: str) -> Quantity | None:
    """Return a parameter of the module as the reference had it in this step."""
    name, step = f"{item.row.name}.{leaf}", item.moment.step
    for moment in (Moment.of(step - 1, Kind.PARAM_AFTER), Moment.of(step, Kind.PARAM)):
        quantity = context.reference.quantity(moment, name)
        if quantity is not None and not quantity.problems:
            return quantity
    return None


def all_of(quantity: Quantity) -> Tensor:
    """Return a whole global tensor."""
    zero = tuple(0 for _ in quantity.shape)
    return quantity.fetch(Box(zero, zero, quantity.shape))


def _cut(context: Context, item: Compared, *, dim: int) -> dict[int, tuple[int, int]]:
    """Return per rank which part of the weight's ``dim`` its group of this dim's axis has.

    Empty where the weight is not cut there, or is not two-dimensional. FSDP cuts the first dim as
    well; its ranks have together what tensor parallelism left them.
    """
    entries = entries_of(context, f"{item.row.name}.weight")
    if not entries or any(len(entry.shape) != 2 for entry in entries.values()):
        return {}
    tensor = [axis for axis in context.mesh.live if axis.startswith("tp")]
    size = next(iter(entries.values())).shape[dim]
    found: dict[int, tuple[int, int]] = {}
    for rank in entries:
        others = context.mesh.others(tensor)
        group = [peer for peer in context.mesh.peers(rank, others) if peer in entries]
        bounds = [_bounds(entries[peer].map, dim) for peer in group]
        held = [each for each in bounds if each is not None]
        if held:
            found[rank] = min(a for a, _ in held), max(b for _, b in held)
    return found if any(part != (0, size) for part in found.values()) else {}


def experts_of_ranks(context: Context, module: str) -> dict[int, tuple[int, int]]:
    """Return per rank which experts of a stack its place along ep has; empty if ep cuts none.

    FSDP may cut the stack further; its ranks have together what expert parallelism left them.
    """
    stacks = {
        entry.name
        for index in context.trace.ranks
        for entry in index.tensors
        # Matrices of experts on top of each other; else FSDP's cuts would look alike.
        if entry.kind == Kind.PARAM and entry.name.rpartition(".")[0] == module
        if len(entry.shape) == 3
    }
    entries = entries_of(context, min(stacks)) if stacks else {}
    at = {rank: context.trace.ranks[rank].coordinates.get("ep") for rank in entries}
    size = max((entry.shape[0] for entry in entries.values() if entry.shape), default=0)
    found: dict[int, tuple[int, int]] = {}
    for rank in entries:
        group = [peer for peer in entries if at[peer] == at[rank]]
        held = [each for peer in group if (each := _bounds(entries[peer].map, 0)) is not None]
        if held and at[rank] is not None:
            found[rank] = min(a for a, _ in held), max(b for _, b in held)
    return found if any(part != (0, size) for part in found.values()) else {}


def _bounds(held: LocalMap, dim: int) -> tuple[int, int] | None:
    spans = held[dim]
    return (spans[0].global_[0], spans[-1].global_[1]) if spans else None


def entries_of(context: Context, name: str) -> dict[int, TensorEntry]:
    """Return what each rank that holds a part of a parameter says of it."""
    return {
        index.rank: entry
        for index in context.trace.ranks
        for entry in index.tensors
        if entry.name == name and entry.kind in (Kind.PARAM, Kind.PARAM_AFTER)
    }


def _axes(context: Context, own: dict[int, tuple[int, int]]) -> tuple[str, ...]:
    """Return the smallest set of axes along which ranks have other parts."""
    for axes in context.mesh.subsets():
        others = context.mesh.others(axes)
        if all(
            own[peer] == own[rank]
            for rank in own
            for peer in context.mesh.peers(rank, others)
            if peer in own
        ):
            return axes
    return ()


def _outside(x: Tensor, space: Tensor) -> float:
    """Return the norm of what of every token lies in no mixture of the space."""
    return float(torch.linalg.vector_norm(x - x @ space @ space.T))


def _space(columns: Tensor) -> Tensor:
    """Return an orthonormal basis of the space of some columns."""
    left, sizes, _ = torch.linalg.svd(columns, full_matrices=False)
    space: Tensor = left[:, sizes > _RANK * sizes[0]]
    return space
