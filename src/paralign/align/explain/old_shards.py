"""Hypothesis: some ranks offered their shards of a weight as they were before the last step.

FSDP puts a weight together from all ranks' shards. Where one rank's are old, every rank computes
with the same mixture, and no rank differs from another; but the words, or features, of that rank's
rows are those of the step before::

    embedding  y = old[word]            where the word's row is one of the rank's
    norm       y = r * old / new        in the features that are the rank's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.own_parts import all_of, entries_of, tokens_of
from paralign.align.explain.proof import Proof, parts_of, proves
from paralign.align.explain.stale import STALE, whole_quantity
from paralign.align.judge import Compared
from paralign.align.pair import Moment
from paralign.align.tensor_entry import TensorEntry
from paralign.align.trace import Kind
from paralign.layout import Box

_MOST_ELEMENTS = 1 << 25  # a larger weight is not read just for this

Corrected = Callable[[Box, Tensor], Tensor]
"""Returns the output at a box as it is where the rows of a mask ``[num_rows]`` are old."""


def prove_old_shards(context: Context, item: Compared) -> Proof | None:
    """Return the proof that some ranks' rows of the module's weight are the last step's."""
    step, name = item.moment.step, f"{item.row.name}.weight"
    if step <= min(context.steps) or item.tolerance is None:
        return None
    earlier = (
        Moment.of(step - 2, Kind.PARAM_AFTER)
        if step - 2 in context.steps
        else Moment.of(step - 1, Kind.PARAM)
    )
    old = whole_quantity(context.reference, earlier, name)
    new = whole_quantity(context.reference, Moment.of(step - 1, Kind.PARAM_AFTER), name)
    if new is None or old is None or math.prod(new.shape) > _MOST_ELEMENTS:
        return None
    corrected = _corrected(context, item, all_of(old), all_of(new))
    held = entries_of(context, name)
    if corrected is None or not held:
        return None
    some = _some(context, item, held, corrected, new.shape[0])
    left = _left(item, torch.ones(new.shape[0], dtype=torch.bool), corrected)
    if proves(item, left):
        # Some are enough where no row of the others was used.
        return _of_all(context, left, () if some is None else some[0], name)
    return None if some is None else _of_some(context, *some, name)


def _some(
    context: Context,
    item: Compared,
    held: Mapping[int, TensorEntry],
    corrected: Corrected,
    num_rows: int,
) -> tuple[tuple[str, ...], list[int], float] | None:
    """Find ranks whose rows alone are old: their axes, they, and the error that is left."""
    tried: set[bytes] = set()
    for axes in context.mesh.subsets():
        for rank in sorted(held):
            group = [r for r in context.mesh.peers(rank, context.mesh.others(axes)) if r in held]
            is_old = torch.zeros(num_rows, dtype=torch.bool)
            for span in (span for peer in group for span in held[peer].map[0]):
                is_old[slice(*span.global_)] = True
            key = is_old.numpy().tobytes()
            if key in tried or bool(is_old.all()) or not bool(is_old.any()):
                continue
            tried.add(key)
            left = _left(item, is_old, corrected)
            if proves(item, left):
                return axes, group, left
    return None


def _corrected(context: Context, item: Compared, old: Tensor, new: Tensor) -> Corrected | None:
    """Return what an embedding, or a norm, makes of rows that are partly old."""
    shape, tokens = tuple(item.base.shape), tokens_of(context, item.moment.step)
    if old.dim() == 2 and tokens is not None and shape == (*tokens.shape, old.shape[1]):

        def embedded(box: Box, is_old: Tensor) -> Tensor:
            rows, positions, features = (
                slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True)
            )
            words = tokens[rows, positions]
            return torch.where(is_old[words].unsqueeze(-1), old[words], new[words])[..., features]

        return embedded
    if old.dim() == 1 and shape[-1:] == tuple(old.shape) and bool((new != 0).all()):

        def scaled(box: Box, is_old: Tensor) -> Tensor:
            features = slice(box.start[-1], box.start[-1] + box.shape[-1])
            factor = torch.where(is_old, old / new, torch.ones_like(new))[features]
            return item.base.fetch(box) * factor

        return scaled
    return None


def _left(item: Compared, is_old: Tensor, corrected: Corrected) -> float:
    error = 0.0
    for piece in (piece for pieces in item.side.replicas.values() for piece in pieces):
        for box in parts_of(piece):
            rest = float(torch.linalg.vector_norm(piece.read(box) - corrected(box, is_old)))
            error = math.hypot(error, rest)
    norm = item.measured.total.base
    return error / norm if norm else math.inf


def _of_all(context: Context, left: float, perhaps: tuple[str, ...], name: str) -> Proof:
    axes = tuple(context.mesh.named(perhaps))
    return Proof(
        STALE,
        left,
        component="state",
        key=(STALE, "weight"),
        detail={"weight": name},
        text=f"Its {name} is that of the step before: what was gathered for its use is an old "
        "copy, or the optimizer's work was lost.",
        candidates=(
            str(Candidate("state", STALE, (), "all of it is old")),
            str(Candidate("state", STALE, axes, "what some ranks hold, and no other was used")),
        )
        if axes
        else (),
        separate_by="record the parameters before this step" if axes else None,
    )


def _of_some(
    context: Context, axes: tuple[str, ...], ranks: list[int], left: float, name: str
) -> Proof:
    at = ", ".join(f"{a}={context.trace.ranks[ranks[0]].coordinates.get(a)}" for a in axes)
    return Proof(
        STALE,
        left,
        tuple(context.mesh.named(axes)),
        component="state",
        key=(STALE, "shards", axes),
        detail={"ranks": ranks, "weight": name},
        text=f"The rows of {name} that the ranks with {at} hold are those of the step before, and "
        "all others are right: their shards were put in place from a copy, or the optimizer's "
        "work on them was lost (an offloaded copy that is not refreshed).",
    )
