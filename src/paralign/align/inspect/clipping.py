"""Gradients after clipping: all scaled by one coefficient, the one that norm and limit give."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from paralign.align.inspect.replicas import copies_agree
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import View
from paralign.align.scalars import step_norms
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_TORCH_EPS = 1e-6  # torch divides by the norm plus this; others divide by the norm


def check_clipping(view: View) -> Check:
    """Hold every clipped gradient against the gradient that it was made from."""
    check = Check("clipping")
    for step in view.steps:
        coefficients = _coefficients(view, step)
        gradients = view.tensors(Kind.GRAD, step)
        if coefficients and not all(copies_agree(view, held) for held in gradients.values()):
            check.why_not = f"step {step}: replicas of gradients disagree, so there is no one norm"
            continue
        check.looked_at += len(coefficients)
        check.findings += _judge(view, step, coefficients)
        if check.findings:
            break
    if not check.looked_at and check.why_not is None:
        check.why_not = "clipping changed no gradient, or they were not recorded on both sides"
    return check


def _coefficients(view: View, step: int) -> dict[tuple[int, str], float]:
    """Return by how much each rank's piece of each gradient was scaled."""
    before = {
        (piece.rank, name, piece.place): piece
        for name, held in view.tensors(Kind.GRAD, step).items()
        for piece in held
        if piece.entry.file is not None and not piece.entry.partial_over
    }
    found = {}
    for name, held in view.tensors(Kind.CLIPPED_GRAD, step).items():
        if name in view.noise_names(step):
            continue
        for piece in held:
            was = before.get((piece.rank, name, piece.place))
            if was is None or piece.entry.file is None:
                continue
            old, new = view.fingerprint(was), view.fingerprint(piece)
            if old.norm > 0 and not old.nonfinite:
                found[piece.rank, name] = math.nan if new.nonfinite else new.norm / old.norm
    return found


def _judge(
    view: View, step: int, coefficients: Mapping[tuple[int, str], float]
) -> Iterator[Finding]:
    if not coefficients:
        return
    limit = 4 * view.tolerance(after_step=False)
    base = sorted(coefficients.values())[len(coefficients) // 2]
    other = {
        key: value
        for key, value in coefficients.items()
        if not abs(value - base) <= limit * abs(base)
    }
    if other:
        yield _several(view, step, coefficients, base, limit)
        return
    clip, norms = view.reader.facts.run.get("clip"), set(step_norms(view.reader, step))
    if not isinstance(clip, int | float) or isinstance(clip, bool) or len(norms) != 1:
        return
    (norm,) = norms
    expected = min(1.0, clip / norm) if norm > 0 else 1.0
    with_eps = min(1.0, clip / (norm + _TORCH_EPS))
    if any(abs(base - value) <= limit * value for value in (expected, with_eps)):
        return
    yield Finding(
        component="clipping",
        cause="wrong_norm",
        evidence={"step": step, "coefficient": base, "expected": expected, "norm": norm},
        fix=f"At step {step} gradients were multiplied by {base:.9g}, but clip={clip} and the "
        f"reported norm {norm:.9g} give {expected:.9g}: they were clipped by another norm, of "
        f"{clip / base:.9g}, than the one that was reported.",
    )


def _several(
    view: View,
    step: int,
    coefficients: Mapping[tuple[int, str], float],
    base: float,
    limit: float,
) -> Finding:
    by_rank: dict[int, float] = {}
    within = False
    for (rank, _), value in coefficients.items():
        mine = by_rank.setdefault(rank, value)
        within = within or not abs(value - mine) <= limit * abs(mine)
    classes = {
        rank: 0.0 if abs(value - base) <= limit * abs(base) else value
        for rank, value in by_rank.items()
    }
    split = None if within else view.split(classes)
    axes = list(split.axes) if split else []
    distinct = sorted({f"{value:.6g}" for value in coefficients.values()})
    shown = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    return Finding(
        component="clipping",
        cause="wrong_norm",
        tensor=next(name for (_, name), value in coefficients.items() if value != base),
        axes=axes,
        evidence={"step": step, "by_rank": {str(rank): value for rank, value in by_rank.items()}},
        fix=f"Gradients were clipped by different coefficients at step {step} ({shown}). "
        + (
            f"Ranks of {', '.join(axes)} each used the norm of what they hold: add the squares up "
            f"over {', '.join(axes)} first, then clip all by the one norm."
            if axes
            else "Clip all parameters together, by the norm over all of them."
        ),
    )
