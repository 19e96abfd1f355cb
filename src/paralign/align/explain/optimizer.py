"""Explain what the optimizer did: its state, the update, and the parameters after the step.

An update is compared with the reference's as ``a`` times it plus ``b`` times the parameter:
another learning rate changes ``a``, another weight decay ``b``, and another step count of Adam both
in a way of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paralign.align.explain.adam import direction_variants
from paralign.align.explain.carried import prove_other_past
from paralign.align.explain.context import Context
from paralign.align.explain.factors import prove_factor
from paralign.align.explain.gradients import group_proofs, told
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.options import options_of
from paralign.align.explain.placement import prove_misplaced
from paralign.align.explain.precision import prove_precision
from paralign.align.explain.proof import (
    Mix,
    Proof,
    Readable,
    finding_of,
    left_in_all,
    limit_of,
    parts_of,
    pieces_once,
    proves,
)
from paralign.align.explain.replicas import spread_of
from paralign.align.explain.single import on_one_rank, single_finding
from paralign.align.explain.stale import STALE, prove_stale
from paralign.align.explain.unknown import unknown_finding
from paralign.align.judge import Compared
from paralign.align.pair import UPDATE, Moment, Quantity
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

DIFFERENT_CONFIG = "different_config"

_KINDS = (Kind.MOMENT, UPDATE, Kind.PARAM_AFTER)
_SAME = 1e-7
_NO_OPTION = 1e-9


def explain_optimizer(context: Context, step: int) -> list[Finding]:
    """Explain the first kind of optimizer result that is out of budget at ``step``."""
    update = context.failing(UPDATE, step)
    frozen, _ = group_proofs(context, update, (prove_not_stepped,))
    if context.upstream:
        return [finding_of(proven, "optimizer", told(proven)) for proven in frozen.values()]
    counts = [i for i in context.failing(Kind.MOMENT, step) if i.row.state == "step"]
    if counts:
        return [_step_count_finding(counts)]
    hypotheses = {
        Kind.MOMENT: (
            prove_misplaced,
            prove_stale,
            prove_untouched,
            prove_other_past,
            prove_factor,
            prove_precision,
        ),
        UPDATE: (
            prove_not_stepped,
            prove_other_options,
            prove_other_formula,
            prove_stale,
            prove_factor,
            prove_precision,
        ),
        Kind.PARAM_AFTER: (prove_misplaced, prove_stale, prove_factor, prove_precision),
    }
    # An update with a known cause tells more than the state it was made from.
    order = (UPDATE, Kind.MOMENT, Kind.PARAM_AFTER)
    unexplained: list[Compared] = []
    for kind in order:
        failing = context.failing(kind, step)
        groups, unknown = group_proofs(context, failing, hypotheses[kind])
        if groups:
            return [
                _finding(context, proven)
                for proven in sorted(groups.values(), key=len, reverse=True)
            ]
        unexplained = unexplained or unknown
    if not unexplained:
        return []
    first = next(kind for kind in _KINDS if context.failing(kind, step))
    finding = unknown_finding(context, context.failing(first, step), "optimizer")
    return [finding]


def _finding(context: Context, proven: list[tuple[Compared, Proof]]) -> Finding:
    if on_one_rank(context, proven):
        return single_finding(context, proven, "optimizer")
    return finding_of(proven, "optimizer", told(proven))


def prove_not_stepped(context: Context, item: Compared) -> Proof | None:
    """Return the proof that some ranks' parameters did not move, although they have gradients."""
    total = item.measured.total
    if not total.base > 0.0:
        return None
    still = {
        rank for rank, part in item.measured.by_rank.items() if part.elements and not part.size
    }
    everyone = {rank for rank, part in item.measured.by_rank.items() if part.elements}
    if not still:
        return None
    others = everyone - still
    if any(rank in item.row.ranks_off for rank in others) and not context.upstream:
        return None
    spread = spread_of(context, item) if others else None
    axes = () if spread is None else tuple(context.mesh.named(spread.axes))
    where = f" on rank {', '.join(map(str, sorted(still)))}" if others else ""
    # With a state the optimizer saw the gradient, so what it wrote was lost.
    cause = STALE if _has_state(context, item) else MISSING_CONTRIBUTION
    return Proof(
        cause,
        0.0,
        axes,
        component="optimizer",
        key=(cause, "not stepped", tuple(sorted(still)) if others else ()),
        detail={"ranks": sorted(still)},
        text=f"The parameters did not move{where}. The optimizer holds other tensors than the "
        "model (built before wrapping, say), or what it stepped is not copied back: build it after "
        "the last wrapper, from the model's parameters.",
    )


def _has_state(context: Context, item: Compared) -> bool:
    """Whether the optimizer keeps moments of this parameter that are not zero."""
    for state in ("exp_avg", "momentum_buffer"):
        moment = Moment.of(item.moment.step, Kind.MOMENT, state)
        quantity = context.parallel.quantity(moment, item.row.name)
        if quantity is not None and quantity.is_present:
            return any(
                bool((piece.read(box) != 0).any())
                for piece in quantity.pieces
                for box in parts_of(piece)
            )
    return False


def prove_untouched(context: Context, item: Compared) -> Proof | None:
    """Return the proof that a state of the optimizer is still zero."""
    del context
    if item.measured.total.size == 0.0 and item.measured.total.base > 0.0:
        return Proof(
            MISSING_CONTRIBUTION,
            0.0,
            key=(MISSING_CONTRIBUTION, "untouched"),
            text="The state is still zero: the optimizer never saw a gradient for it.",
        )
    return None


@dataclass(frozen=True)
class Fit:
    """``update = a * the reference's update + b * parameter``."""

    a: float
    b: float
    left: float


def prove_other_options(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the update is that of another learning rate, decay or step count."""
    fit = _fit(context, item)
    if fit is None or not proves(item, fit.left):
        return None
    options = options_of(context, item.row.name)
    option, value, text = _read(fit, options, item)
    return Proof(
        DIFFERENT_CONFIG,
        fit.left,
        component="optimizer",
        key=(DIFFERENT_CONFIG, option, value),
        detail={"option": option, "value": value, "a": fit.a, "b": fit.b},
        text=text,
    )


def _fit(context: Context, item: Compared) -> Fit | None:
    before = _before(context, item)
    if before is None or limit_of(item) is None:
        return None
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for piece in pieces_once(item):
        for box in parts_of(piece):
            rows = [piece.read(box), item.base.fetch(box), before.fetch(box)]
            stacked = torch.stack([row.reshape(-1) for row in rows])
            sums += stacked @ stacked.T
    gram, right = sums[1:, 1:], sums[0, 1:]
    scale = gram.diagonal().clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    if float(sums[1, 1]) == 0.0:
        return None
    pairs: list[tuple[float, float]] = [(float(sums[0, 1] / sums[1, 1]), 0.0)]
    matrix = gram / scale[:, None] / scale[None, :]
    if float(torch.linalg.det(matrix)) > 1e-6:
        solved = torch.linalg.solve(matrix, right / scale) / scale
        pairs.append((float(solved[0]), float(solved[1])))
        # Decay alone keeps the rest of the update as it is.
        alone = float((sums[0, 2] - sums[1, 2]) / sums[2, 2]) if float(sums[2, 2]) else 0.0
        pairs.insert(0, (1.0, alone))
    norm = math.sqrt(float(sums[1, 1]))
    for a, b in pairs:
        terms: list[tuple[float, Readable]] = [(a, item.base)]
        if b:
            terms.append((b, before))
        left = left_in_all(item, Mix(tuple(terms)), norm)
        if proves(item, left):
            return Fit(a, b, left)
    return None


def _before(context: Context, item: Compared) -> Quantity | None:
    step, name = item.moment.step, item.row.name
    for moment in (Moment.of(step - 1, Kind.PARAM_AFTER), Moment.of(step, Kind.PARAM)):
        found = context.parallel.quantity(moment, name)
        if found is not None and not found.problems:
            return found
    return None


def _read(fit: Fit, options: Mapping[str, Any], item: Compared) -> tuple[str, float, str]:
    """Say which option the fit means."""
    rate, decay = _number(options.get("lr")), _number(options.get("weight_decay")) or 0.0
    name = item.row.name
    if abs(fit.a - 1.0) <= _SAME and rate:
        other = decay - fit.b / rate
        value = _round(other)
        how = "is not decayed" if abs(value) < 1e-9 else f"is decayed with {value:g}"
        return (
            "weight_decay",
            value,
            f"The update is that of weight_decay={value:g}, not {decay:g}: {name} {how}. Choose "
            "what is decayed by the parameter's own number of dims and name, not by its shard's.",
        )
    value = _round(fit.a * rate) if rate else _round(fit.a)
    extra = ""
    if fit.b and rate:
        extra = f" and weight_decay={_round(decay - fit.b / rate / fit.a):g}"
    return (
        "lr",
        value,
        f"The update is {_round(fit.a):g} times the reference's{extra}, as with lr={value:g} "
        "instead. Compare the learning rate's schedule, its scaling with the batch, and whether "
        "the optimizer steps twice.",
    )


def prove_other_formula(context: Context, item: Compared) -> Proof | None:
    """Return the proof that the update follows from the state by another formula of Adam."""
    before = _before(context, item)
    options = options_of(context, item.row.name)
    if before is None or limit_of(item) is None:
        return None
    for told_as, option, value, variant in direction_variants(context, item, before, options):
        left = left_in_all(item, variant, item.measured.total.base)
        if proves(item, left):
            return Proof(
                DIFFERENT_CONFIG,
                left,
                component="optimizer",
                key=(DIFFERENT_CONFIG, told_as),
                detail={"option": option, "value": value, "formula": told_as},
                text=f"The update is what Adam gives {told_as}. Use the same formula and options "
                "in both runs.",
            )
    return None


def _step_count_finding(items: list[Compared]) -> Finding:
    worst = max(items, key=lambda item: item.row.strain)
    values = worst.row.worst_values or (math.nan, math.nan)
    times = values[1] - values[0]
    return Finding(
        component="state",
        cause=STALE,
        tensor=worst.row.label,
        evidence={
            "eps_before": worst.row.eps,
            "eps_after": 0.0,
            "share_beyond_2e-3": worst.row.share_beyond,
            "option": "step",
            "reference": values[0],
            "parallel": values[1],
            "tensors": len(items),
            "step": worst.row.step,
        },
        fix=f"The optimizer has counted {values[1]:g} steps where the reference has counted "
        f"{values[0]:g} ({times:+g}): it steps more often than once per step, or its state was "
        "not reset. Look for a second optimizer.step(), also in warm-up code.",
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _round(value: float) -> float:
    return 0.0 if abs(value) < _NO_OPTION else float(f"{value:.6g}")
