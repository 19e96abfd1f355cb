"""Explain clipping: by how much each gradient was really scaled before the optimizer used it.

The first moment of Adam, at its first step, is ``(1 - beta1)`` times the gradient it was given; a
recorded clipped gradient says it directly. Their ratio to the gradient before clipping is the
coefficient that was applied, so the norm that clipping used is known even if nobody reported it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.factors import named_factor
from paralign.align.explain.options import options_of
from paralign.align.judge import Compared
from paralign.align.measure import measure
from paralign.align.pair import Moment
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

WRONG_NORM = "wrong_norm"
CONSTANT_FACTOR = "constant_factor"

# torch adds this to the norm before it divides.
NORM_EPS = 1e-6
_SAME = 1e-6


@dataclass(frozen=True)
class Applied:
    """The coefficient by which a parameter's gradient was scaled, on each rank."""

    item: Compared
    by_rank: Mapping[int, float]


def explain_clipping(context: Context, step: int) -> list[Finding]:
    """Explain gradients that were scaled by something else than clipping should have."""
    limit = clip_value(context)
    suspects = [*context.failing(Kind.CLIPPED_GRAD, step), *context.failing(Kind.MOMENT, step)]
    if limit is None or not suspects or not math.isfinite(limit):
        return []
    gradients = context.judged(Kind.GRAD, step)
    if not gradients or not all(item.row.ok for item in gradients):
        return []
    own = math.hypot(*(item.measured.total.size for item in gradients))
    right = min(1.0, limit / (own + NORM_EPS))
    applied = [found for item in gradients if (found := _applied(context, item)) is not None]
    if not applied:
        return []
    values = [value for found in applied for value in found.by_rank.values()]
    if all(_same(value, right) for value in values):
        return []
    if all(_same(value, values[0]) for value in values):
        finding = _everywhere(applied, values[0], right, limit, own)
        return [] if finding is None else [finding]
    finding = _by_group(context, applied, right, limit, own)
    return [] if finding is None else [finding]


def clip_value(context: Context) -> float | None:
    """Return the largest norm that the run was told to allow."""
    value = context.trace.facts.run.get("clip")
    return float(value) if isinstance(value, int | float) else None


def _applied(context: Context, item: Compared) -> Applied | None:
    """Return what scaled a parameter's gradient, if what came of it was recorded."""
    step, name = item.moment.step, item.row.name
    clipped = context.parallel.quantity(Moment.of(step, Kind.CLIPPED_GRAD), name)
    factor = 1.0
    if clipped is None:
        clipped = context.parallel.quantity(Moment.of(step, Kind.MOMENT, "exp_avg"), name)
        betas = options_of(context, name).get("betas")
        if not isinstance(betas, list | tuple) or step != min(context.steps):
            return None
        factor = 1.0 - float(betas[0])
    if clipped is None or clipped.problems or not clipped.is_present or item.side.problems:
        return None
    measured = measure(clipped, item.side)
    by_rank = {
        rank: part.scale / factor
        for rank, part in measured.by_rank.items()
        if part.scale is not None and part.base > 0.0
    }
    return Applied(item, by_rank) if by_rank else None


def _everywhere(
    applied: Sequence[Applied], value: float, right: float, limit: float, own: float
) -> Finding | None:
    """One coefficient for all, but not the right one."""
    if _same(value, 1.0):
        text = f"Gradients were not clipped, although their norm {own:.6g} is above {limit:g}."
        return _finding(applied, CONSTANT_FACTOR, (), right, value, text)
    if _same(value, right * right):
        text = "Gradients were clipped twice."
        return _finding(applied, CONSTANT_FACTOR, (), right, value, text)
    factor = named_factor(value / right, _SAME)
    if factor is not None:
        text = (
            f"Gradients were scaled by {factor} besides clipping to {limit:g}: the coefficient was "
            f"applied twice, the limit is another, or something scales them after clipping."
        )
        finding = _finding(applied, CONSTANT_FACTOR, (), right, value, text)
        # What the optimizer used was recorded, not what clipping left.
        finding.candidates = [
            str(Candidate("clipping", CONSTANT_FACTOR, (), "the coefficient")),
            str(Candidate("optimizer", CONSTANT_FACTOR, (), "unscaled after clipping")),
        ]
        finding.separate_by = "run again without clipping: a factor that stays is not clipping's"
        return finding
    used = limit / value - NORM_EPS
    text = (
        f"Gradients were scaled by {value:.9g} where clipping to {limit:g} scales by {right:.9g}: "
        f"as if their norm was {used:.9g} and not {own:.9g}."
    )
    return _finding(applied, WRONG_NORM, (), right, value, text)


def _by_group(
    context: Context, applied: Sequence[Applied], right: float, limit: float, own: float
) -> Finding | None:
    """Ranks clip by different coefficients: each group used its own norm."""
    by_rank: dict[int, float] = {}
    for found in applied:
        for rank, value in found.by_rank.items():
            if rank in by_rank and not _same(by_rank[rank], value):
                return _some(applied, right, limit)
            by_rank[rank] = value
    for axes in [(), *context.mesh.subsets()]:
        groups = {rank: frozenset(context.mesh.peers(rank, axes)) for rank in by_rank}
        norms = {group: _norm_within(applied, group) for group in set(groups.values())}
        if all(
            _same(value, min(1.0, limit / (norms[groups[rank]] + NORM_EPS)))
            for rank, value in by_rank.items()
        ):
            missing = context.mesh.others(axes)
            needed = tuple(_differing(context, by_rank, missing))
            over = " x ".join(needed) or "all ranks"
            text = (
                f"Ranks along {over} clip by different coefficients: each uses the norm of its own "
                f"gradients. Add up the squares over {over} before the root is taken."
            )
            worst = max(by_rank.values(), key=lambda value: abs(value - right))
            return _finding(
                applied, WRONG_NORM, tuple(context.mesh.named(needed)), right, worst, text
            )
    differing = tuple(_differing(context, by_rank, context.mesh.live))
    worst = max(by_rank.values(), key=lambda value: abs(value - right))
    text = f"Ranks along {' x '.join(differing)} scale gradients by different coefficients."
    return _finding(applied, WRONG_NORM, tuple(context.mesh.named(differing)), right, worst, text)


def _some(applied: Sequence[Applied], right: float, limit: float) -> Finding:
    """Some parameters were clipped by another coefficient than others."""
    odd = [found for found in applied if not all(_same(v, right) for v in found.by_rank.values())]
    worst = next(iter(odd[0].by_rank.values()))
    names = ", ".join(found.item.row.name for found in odd[:3])
    text = (
        f"{len(odd)} of {len(applied)} parameters ({names}) were not scaled by the common "
        f"coefficient of clipping to {limit:g}: clip all of them in one call, by one norm."
    )
    return _finding(odd, WRONG_NORM, (), right, worst, text)


def _norm_within(applied: Sequence[Applied], ranks: frozenset[int]) -> float:
    squares = []
    for found in applied:
        parts = found.item.side.replicas
        for pieces in parts.values():
            held = [piece.rank for piece in pieces if piece.rank in ranks]
            if held:
                measured = found.item.measured
                whole = len(parts) == 1
                squares.append(measured.total.size if whole else measured.by_rank[held[0]].size)
    return math.hypot(*squares)


def _differing(
    context: Context, by_rank: Mapping[int, float], axes: Sequence[str]
) -> Iterator[str]:
    for axis in axes:
        for rank, value in by_rank.items():
            peers = context.mesh.peers(rank, (axis,))
            if any(not _same(by_rank.get(peer, value), value) for peer in peers):
                yield axis
                break


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(abs(a), abs(b))


def _finding(
    applied: Sequence[Applied],
    cause: str,
    axes: tuple[str, ...],
    right: float,
    value: float,
    text: str,
) -> Finding:
    first = applied[0].item
    return Finding(
        component="clipping",
        cause=cause,
        tensor=first.row.name,
        axes=list(axes),
        evidence={
            "eps_before": None,
            "eps_after": None,
            "share_beyond_2e-3": None,
            "coefficient": value,
            "expected_coefficient": right,
            "tensors": len(applied),
            "step": first.moment.step,
        },
        fix=text,
    )
