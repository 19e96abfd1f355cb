"""Explain initial weights that differ: other numbers, or right numbers at the wrong place."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from paralign.align.explain.context import Context
from paralign.align.explain.factors import CONSTANT_FACTOR
from paralign.align.explain.gradients import group_proofs, told
from paralign.align.explain.missing import prove_absent, prove_zeros
from paralign.align.explain.placement import WRONG_LAYER, prove_misplaced, prove_permuted_rows
from paralign.align.explain.precision import prove_precision
from paralign.align.explain.proof import Held, Mix, Proof, error_left, finding_of, parts_of
from paralign.align.explain.replicas import spread_of
from paralign.align.explain.single import on_one_rank, single_finding
from paralign.align.explain.unknown import unknown_finding
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding
from paralign.layout import boxes, local_shape

RNG = "rng"

# Two independent draws of n numbers have a cosine of about 1/sqrt(n).
_UNRELATED_SIGMAS = 6.0
_LEAST_ELEMENTS = 16
_MOST_SIZE_RATIO = 1.5
_FACTOR_LEFT = 1e-6


def explain_weights(context: Context, step: int) -> list[Finding]:
    """Explain the initial parameters that are not bitwise equal."""
    failing = context.failing(Kind.PARAM, step)
    if not failing:
        return []
    hypotheses = (
        prove_absent,
        prove_misplaced,
        prove_same_shards,
        prove_permuted_rows,
        prove_zeros,
        prove_scaled,
        prove_precision,
        prove_drawn_anew,
    )
    groups, unknown = group_proofs(context, failing, hypotheses)
    if any(proven[0][1].cause == RNG for proven in groups.values()):
        # Small tensors (biases, norms) drawn anew show no statistics; the large ones speak for all.
        unknown = [item for item in unknown if not item.row.ranks_off]
    findings = []
    for proven in sorted(groups.values(), key=len, reverse=True):
        _add_axes(context, proven)
        if proven[0][1].cause != RNG and on_one_rank(context, proven):
            findings.append(single_finding(context, proven, "weights"))
        else:
            findings.append(finding_of(proven, "weights", told(proven)))
    if unknown:
        finding = unknown_finding(context, unknown, "weights", alone=not findings)
        if finding.cause != "single_rank":
            finding.fix = "The runs start from different weights. Start both from the same ones."
        findings.append(finding)
    return findings


def _add_axes(context: Context, proven: list[tuple[Compared, Proof]]) -> None:
    """Name the axis whose coordinates tell which ranks are wrong, where others are right."""
    off = {rank for item, _ in proven for rank in item.row.ranks_off}
    axes = context.mesh.coordinates_that_tell(sorted(off), range(context.mesh.world_size))
    if proven[0][1].cause == WRONG_LAYER and "pp" in axes:
        axes = ("pp",)  # layers are dealt to stages; along other axes the mistake only repeats
    for _, proof in proven:
        if not proof.axes and proof.cause in (WRONG_LAYER, RNG):
            proof.axes = tuple(context.mesh.named(axes))


def prove_scaled(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the weights are a factor off: another scale of initialisation.

    Weights must be bitwise equal, which a product cannot be: what is left is held against eps.
    """
    del context
    scale = item.measured.total.scale
    if scale is None or scale == 0.0 or abs(scale - 1.0) < _FACTOR_LEFT:
        return None
    pieces = [pieces[0] for pieces in item.side.replicas.values()]
    norm = item.measured.total.base * abs(scale)
    left = error_left(pieces, Mix(((scale, item.base),)), norm, stop_at=_FACTOR_LEFT)
    if not left <= _FACTOR_LEFT:
        return None
    factor = f"{scale:.9g}"
    return Proof(
        CONSTANT_FACTOR,
        left,
        key=(CONSTANT_FACTOR, factor),
        detail={"factor": factor},
        text="Its initialisation uses another scale: standard deviation, or a factor for depth.",
    )


def prove_same_shards(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ranks which hold different shards hold the same numbers."""
    held = list(item.side.replicas.items())
    for number, (one, pieces) in enumerate(held):
        for other, others in held[number + 1 :]:
            if local_shape(one) != local_shape(other) or len(boxes(one)) != 1:
                continue
            if _equal_pieces(pieces[0], others[0]) and not _is_constant(pieces[0]):
                ranks = [pieces[0].rank, others[0].rank]
                axes = tuple(context.mesh.named(context.mesh.axes_of(ranks)))
                return Proof(
                    RNG,
                    math.nan,
                    axes,
                    key=(RNG, "same shards", axes),
                    detail={"ranks": ranks},
                    text=f"Ranks {ranks[0]} and {ranks[1]} hold different shards, but the same "
                    "numbers in them: every rank draws its shard from the same seed. Draw the "
                    "whole tensor and cut it, or make the numbers depend on the global index.",
                )
    return None


def prove_drawn_anew(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the weights are other random numbers of the same distribution."""
    off = [
        part
        for rank, part in item.measured.by_rank.items()
        if rank in item.row.ranks_off and part.elements
    ]
    if not off or any(not _is_unrelated(item, part.cosine, part.elements) for part in off):
        return None
    if any(not 1 / _MOST_SIZE_RATIO <= part.size / part.base <= _MOST_SIZE_RATIO for part in off):
        return None
    spread = spread_of(context, item) if item.measured.replicas_differ else None
    everyone = sorted(rank for rank, part in item.measured.by_rank.items() if part.elements)
    apart = context.mesh.coordinates_that_tell(item.row.ranks_off, everyone)
    axes = tuple(context.mesh.named(apart or (spread.axes if spread is not None else ())))
    where = f"Replicas over {' x '.join(axes)} differ: e" if axes else "E"
    return Proof(
        RNG,
        math.nan,
        axes,
        key=(RNG, "anew", axes),
        detail={"ranks": item.row.ranks_off},
        text=f"The numbers are unrelated to the reference's, of the same size. {where}very rank "
        "must start from the same seed and draw in the same order, or load the same checkpoint.",
    )


def _is_unrelated(item: Compared, cosine: float | None, elements: int) -> bool:
    if cosine is None or elements < _LEAST_ELEMENTS:
        return False
    first = next(_values(next(iter(item.side.replicas.values()))[0]))
    centred = abs(float(first.mean())) < 0.5 * float(first.std()) if first.numel() > 1 else False
    return centred and abs(cosine) < min(0.5, _UNRELATED_SIGMAS / math.sqrt(elements))


def _values(piece: Held) -> Iterator[torch.Tensor]:
    for box in parts_of(piece):
        yield piece.read(box)


def _equal_pieces(one: Held, other: Held) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_values(one), _values(other), strict=True))


def _is_constant(piece: Held) -> bool:
    return all(bool((values == values.reshape(-1)[0]).all()) for values in _values(piece))
