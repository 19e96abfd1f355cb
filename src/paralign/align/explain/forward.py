"""Hypotheses about a module's output that is the first to be off: what arrived, and what left.

Outputs are tensors like any other once the token map has placed them, so a factor, another order,
a narrower dtype and another moment's values are proven on them as on a gradient. What is special is
the place: the first output of a later stage points at what was sent to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.expert_parts import prove_experts
from paralign.align.explain.factors import prove_factor
from paralign.align.explain.missing import prove_absent, prove_zeros
from paralign.align.explain.own_parts import (
    prove_lost_words,
    prove_other_slices,
    prove_own_part,
)
from paralign.align.explain.placement import Relocated, matching_order, prove_permuted_rows
from paralign.align.explain.precision import prove_precision
from paralign.align.explain.proof import (
    Held,
    Proof,
    error_left,
    limit_of,
    parts_of,
    pieces_once,
    proves,
)
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.layout import Box, LocalMap, local_shape

RNG = "rng"
STALE = "stale"
WRONG_LAYER = "wrong_layer"
PERMUTED_SHARDS = "permuted_shards"
DIFFERENT_CONFIG = "different_config"

# Dropout zeroes some elements and scales the others by one number.
_LEAST_DROPPED, _MOST_DROPPED = 0.005, 0.95


def prove_output(context: Context, item: Compared) -> Proof | None:
    """Return the first hypothesis that holds for an output by itself."""
    for hypothesis in (
        prove_absent,
        prove_factor,
        prove_lost_words,
        prove_experts,
        prove_dropout,
        prove_own_part,
        prove_other_slices,
        prove_other_rows,
        prove_other_module,
        prove_permuted_features,
        prove_first_token_permuted,
        prove_other_scale_per_token,
        prove_precision,
        prove_zeros,
        prove_lost_features,
    ):
        proof = hypothesis(context, item)
        if proof is not None:
            return proof
    return None


def stage_axes(context: Context, item: Compared) -> tuple[str, ...]:
    """Return pp if what comes before the output was made by another stage, and is right."""
    outputs = context.judged(Kind.OUTPUT, item.moment.step)
    at = next((number for number, output in enumerate(outputs) if output is item), 0)
    if "pp" not in context.mesh.live or at == 0:
        return ()
    before = outputs[at - 1]
    return () if set(before.measured.by_rank) & set(item.measured.by_rank) else ("pp",)


def prove_dropout(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the output went through a dropout that the reference's did not."""
    limit = limit_of(item)
    if limit is None:
        return None
    dropped = elements = 0
    scales: list[float] = []
    error = kept_norm = 0.0
    for piece in pieces_once(item):
        for box in parts_of(piece):
            x, r = piece.read(box), item.base.fetch(box)
            kept = x != 0
            dropped += int((~kept & (r != 0)).sum())
            elements += x.numel()
            if not bool(kept.any()):
                continue
            scale = float((x[kept] * r[kept]).sum() / r[kept].square().sum().clamp_min(1e-300))
            scales.append(scale)
            error = math.hypot(error, float(torch.linalg.vector_norm(x[kept] - scale * r[kept])))
            kept_norm = math.hypot(kept_norm, float(torch.linalg.vector_norm(scale * r[kept])))
    share = dropped / max(elements, 1)
    if not scales or not _LEAST_DROPPED < share < _MOST_DROPPED or not kept_norm:
        return None
    if max(scales) - min(scales) > 1e-6 * abs(scales[0]) or abs(scales[0] - 1.0) < 1e-6:
        return None
    left = error / kept_norm
    if not proves(item, left):
        return None
    return Proof(
        RNG,
        left,
        key=(RNG,),
        detail={"dropped": share, "scale": scales[0]},
        text=f"{100 * share:.1f} % of its elements are zero and the others {scales[0]:.6g} times "
        "the reference's: a dropout with another mask. Draw masks from (seed, step, layer, global "
        "token), or switch dropout off in both runs.",
    )


def prove_other_rows(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ranks hold what belongs to other tokens: another micro-batch's."""
    places = [(held, pieces[0].rank) for held, pieces in item.side.replicas.items() if pieces]
    found: dict[tuple[Held, int], float] = {}
    limit = limit_of(item)
    if limit is None:
        return None
    wrong = 0
    ranks: set[tuple[int, int]] = set()
    replicas = item.side.replicas
    everyone = [
        (held, piece)
        for held, pieces in replicas.items()
        for piece in (pieces if item.measured.replicas_differ else pieces[:1])
    ]
    for held, piece in everyone:
        norm = _norm_of(piece)
        if error_left([piece], item.base, norm, stop_at=limit) <= limit:
            continue
        wrong += 1
        # Its own first: the same rows may have come to several ranks.
        for other, _ in sorted(places, key=lambda place: place[1] != piece.rank):
            if other == held or not _same_shape(held, other):
                continue
            left = error_left([piece], Relocated(item.base, held, other), norm, stop_at=limit)
            if left <= limit:
                found[piece, piece.rank] = left
                ranks.add((piece.rank, _nearest(context, piece.rank, replicas[other])))
                break
        else:
            return None
    if not found:
        return None
    left = max(found.values())
    if not proves(item, left):
        return None
    own = all(rank == holder for rank, holder in ranks)
    axes = stage_axes(context, item)
    between = {axis for pair in ranks for axis in context.mesh.axes_of(pair)}
    if not axes and not own:
        axes = tuple(axis for axis in context.mesh.live if axis in between)
    return Proof(
        STALE if own else PERMUTED_SHARDS,
        left,
        tuple(context.mesh.named(axes)),
        key=(STALE, own),
        detail={"pieces": wrong},
        text="Each wrong piece is right for other tokens: "
        + (
            "those of another micro-batch of the same rank. A buffer is not refreshed, or read "
            "too early."
            if own
            else "those of another rank. Pieces are put together in another order."
        ),
    )


def _nearest(context: Context, rank: int, pieces: Sequence[Held]) -> int:
    """Return the holder of a part that differs from ``rank`` along the fewest axes."""
    return min(
        (piece.rank for piece in pieces),
        key=lambda holder: len(context.mesh.axes_of(sorted({rank, holder}))),
    )


def prove_other_module(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the output is what another module of the reference returns here."""
    limit = limit_of(item)
    if limit is None:
        return None
    for other in context.judged(Kind.OUTPUT, item.moment.step):
        if other is item or other.base.shape != item.base.shape:
            continue
        norm = other.measured.total.base
        left = error_left(pieces_once(item), other.base, norm, stop_at=limit)
        if proves(item, left):
            return Proof(
                WRONG_LAYER,
                left,
                tuple(context.mesh.named(stage_axes(context, item))),
                key=(WRONG_LAYER,),
                detail={"returns": other.row.name},
                text=f"It returns what {other.row.name} returns in the reference: layers run in "
                "another order, or one is skipped.",
            )
    return None


def prove_permuted_features(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the features are right but in another order."""
    proof = prove_permuted_rows(context, item)
    if proof is not None and not proof.axes:
        cp = [axis for axis in context.mesh.live if axis in ("cp", "sp", "tp")]
        proof.axes = tuple(context.mesh.named(cp[:1]))
    return proof


def prove_first_token_permuted(context: Context, item: Compared) -> Proof | None:
    """Return the proof that heads are mixed up, from the first token of every row.

    It attends to itself alone, so what leaves attention there is its own value, whatever the scores
    are: values in another order are heads in another order.
    """
    shape = item.base.shape
    limit = limit_of(item)
    if len(shape) < 3 or limit is None or math.prod(shape[2:]) < 2:
        return None
    box = Box(tuple(0 for _ in shape), tuple(0 for _ in shape), (shape[0], 1, *shape[2:]))
    x = item.side.fetch(box).reshape(shape[0], -1)
    r = item.base.fetch(box).reshape(shape[0], -1)
    norm = float(torch.linalg.vector_norm(r))
    if not norm > 0.0 or float(torch.linalg.vector_norm(x - r)) <= limit * norm:
        return None
    order = matching_order(x.T.contiguous(), r.T.contiguous())
    left = float(torch.linalg.vector_norm(x - r.index_select(1, order))) / norm
    if not proves(item, left):
        return None
    cp = tuple(axis for axis in context.mesh.live if axis in ("cp", "sp", "tp"))
    return Proof(
        PERMUTED_SHARDS,
        left,
        tuple(context.mesh.named(cp[:1])),
        key=(PERMUTED_SHARDS, "heads"),
        detail={"at": "the first token"},
        text="At the first token, which sees itself alone, the values are right but in another "
        "order: query heads meet the keys and values of other heads. Repeat K/V heads "
        "(repeat_interleave), do not tile them, and keep heads in order in the exchange.",
    )


def prove_other_scale_per_token(context: Context, item: Compared) -> Proof | None:
    """Return the proof that every token's output is a multiple of the reference's, its own one."""
    del context
    shape, limit = item.base.shape, limit_of(item)
    if len(shape) < 3 or limit is None:
        return None
    error = norm = 0.0
    low, high = math.inf, -math.inf
    # Every replica counts: one that is right shows a multiple of one.
    for piece in (piece for pieces in item.side.replicas.values() for piece in pieces):
        for box in parts_of(piece):
            x = piece.read(box).flatten(2)
            r = item.base.fetch(box).flatten(2)
            if x.shape[2] < 2:
                return None
            scale = (x * r).sum(2) / r.square().sum(2).clamp_min(1e-300)
            low, high = min(low, float(scale.min())), max(high, float(scale.max()))
            error = math.hypot(error, float(torch.linalg.vector_norm(x - scale[..., None] * r)))
            norm = math.hypot(norm, float(torch.linalg.vector_norm(x)))
    left = error / norm if norm else math.inf
    if not proves(item, left) or not low > 0.0:  # what is zero was not normalised at all
        return None
    return Proof(
        DIFFERENT_CONFIG,
        left,
        key=(DIFFERENT_CONFIG, "per token"),
        detail={"least_scale": low, "largest_scale": high},
        text=f"Every token's output is a multiple of the reference's, from {low:.9g} to {high:.9g}:"
        " it is normalised by something else. Compare the eps of this norm, and the dim it takes "
        "the mean over.",
    )


def prove_lost_features(context: Context, item: Compared) -> Proof | None:
    """Say that whole features are zero, though what became of the others is no longer right."""
    shape = item.base.shape
    if len(shape) < 3:
        return None
    lost: torch.Tensor | None = None
    for piece in pieces_once(item):
        for box in parts_of(piece):
            x, r = piece.read(box).flatten(2), item.base.fetch(box).flatten(2)
            if x.shape[2] != math.prod(shape[2:]):
                return None
            gone = (x == 0).all(1).all(0) & (r != 0).any(1).any(0)
            lost = gone if lost is None else lost & gone
    if lost is None or not 0 < int(lost.sum()) < len(lost):
        return None
    axes = tuple(context.mesh.named(stage_axes(context, item)))
    return Proof(
        "missing_contribution",
        math.nan,
        axes,
        key=("missing_contribution", "features"),
        detail={"features_lost": int(lost.sum()), "features": len(lost)},
        text=f"{int(lost.sum())} of {len(lost)} features are zero at every token: part of what "
        "arrives here was lost. Wait for the receive before the buffer is used.",
        candidates=(
            str(Candidate("forward", "missing_contribution", axes, "part of it never came")),
            str(Candidate("forward", "unknown", axes, "the module itself returns zeros there")),
        ),
        separate_by="run again with pp of size 1: what is lost between stages comes",
    )


def _same_shape(one: LocalMap, other: LocalMap) -> bool:
    return local_shape(one) == local_shape(other)


def _norm_of(piece: Held) -> float:
    return math.hypot(
        *(float(torch.linalg.vector_norm(piece.read(box))) for box in parts_of(piece))
    )
