"""Explain a gradient norm that is not the norm of the run's own gradients.

The run under test is held against itself: its gradients were recorded, so the norm it should have
reported is known, whatever the reference says. What it did report is then one of the usual wrong
ways to add up: a stage's own part, replicas counted again, a parameter left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paralign.align.explain.clip import NORM_EPS, clip_value
from paralign.align.explain.context import Context
from paralign.align.judge import Compared
from paralign.align.scalars import step_norms
from paralign.align.trace import Kind
from paralign.align.verdict import Finding, TensorRow

WRONG_NORM = "wrong_norm"
REPORTED_VALUE = "reported_value"


@dataclass(frozen=True)
class Guess:
    """A wrong way to compute the norm, and what it gives on each rank."""

    told: str
    by_rank: tuple[float, ...]
    axes: tuple[str, ...] = ()
    detail: tuple[tuple[str, object], ...] = ()
    cause: str = WRONG_NORM


def explain_norm(context: Context, step: int) -> list[Finding]:
    """Explain the reported gradient norm of ``step`` if it is not that of the gradients."""
    row = context.scalar("norm", step)
    if row is None or row.ok or row.budget_eps is None or row.worst_values is None:
        return []
    gradients = context.judged(Kind.GRAD, step)
    if not gradients:
        return []
    own = math.hypot(*(item.measured.total.size for item in gradients))
    values = step_norms(context.trace, step)
    tolerance = _tolerance(context, row)
    if all(_close(value, own, tolerance) for value in values):
        return []  # right for these gradients: what is wrong with them was said before
    for guess in _guesses(context, gradients, own):
        if _fits(guess, values, tolerance):
            return [_finding(row, own, guess, step)]
    if not all(item.row.ok for item in gradients):
        return []
    return [_finding(row, own, None, step)]


def _tolerance(context: Context, row: TensorRow) -> float:
    """The norm's relative budget, as a guess must meet it."""
    return (row.budget_eps or 0.0) * context.budget.eps


def _fits(guess: Guess, values: Sequence[float], tolerance: float) -> bool:
    """Whether every reported value is what the guess gives on some rank, and none is left over."""
    possible = set(guess.by_rank)
    return all(any(_close(value, p, tolerance) for p in possible) for value in values)


def _close(value: float, expected: float, tolerance: float) -> bool:
    return abs(value - expected) <= tolerance * abs(expected)


def _guesses(context: Context, gradients: Sequence[Compared], own: float) -> Iterator[Guess]:
    limit = clip_value(context)
    if limit is not None and limit < own:
        after = own * limit / (own + NORM_EPS)
        yield Guess("the norm after clipping", (after,), cause=REPORTED_VALUE)
    yield from _partial_sums(context, gradients)
    yield from _counted_again(context, gradients)
    yield from _other_formulas(context, gradients, own)
    yield from _without_some(gradients, own)


def _partial_sums(context: Context, gradients: Sequence[Compared]) -> Iterator[Guess]:
    """The squares were added up over some axes only, so each group has a norm of its own."""
    mesh = context.mesh
    for axes in [(), *mesh.subsets()]:
        if not (missing := mesh.others(axes)):
            continue
        norms = tuple(
            _norm_within(gradients, frozenset(mesh.peers(rank, axes)))
            for rank in range(mesh.world_size)
        )
        needed = _needed(context, gradients, missing)
        told = "the norm of what one rank holds" if not axes else "the norm within one group"
        yield Guess(
            f"{told}: the squares are not added up over {' x '.join(needed) or 'all ranks'}",
            norms,
            tuple(mesh.named(needed)),
        )


def _needed(
    context: Context, gradients: Sequence[Compared], missing: Sequence[str]
) -> tuple[str, ...]:
    """Of the axes left out, those along which ranks hold different parts."""
    needed = []
    for axis in missing:
        for rank in range(context.mesh.world_size):
            group = context.mesh.peers(rank, (axis,))
            if not _close(
                _norm_within(gradients, frozenset(group)),
                _norm_within(gradients, frozenset((rank,))),
                1e-12,
            ):
                needed.append(axis)
                break
    return tuple(needed)


def _norm_within(gradients: Sequence[Compared], ranks: frozenset[int]) -> float:
    """Return the norm of the distinct parts that ``ranks`` hold."""
    squares = []
    for item in gradients:
        for pieces in item.side.replicas.values():
            held = [piece for piece in pieces if piece.rank in ranks]
            if held:
                squares.append(_piece_norm(item, held[0].rank, len(item.side.replicas)))
    return math.hypot(*squares)


def _piece_norm(item: Compared, rank: int, num_parts: int) -> float:
    return item.measured.total.size if num_parts == 1 else item.measured.by_rank[rank].size


def _counted_again(context: Context, gradients: Sequence[Compared]) -> Iterator[Guess]:
    """Replicas were added up as if they were different parts."""
    for axes in context.mesh.subsets():
        squares = []
        again = 0
        for item in gradients:
            for pieces in item.side.replicas.values():
                ranks = {piece.rank for piece in pieces}
                copies = len(ranks & set(context.mesh.peers(pieces[0].rank, axes)))
                again += copies > 1
                norm = _piece_norm(item, pieces[0].rank, len(item.side.replicas))
                squares.append(math.sqrt(copies) * norm)
        if again:
            yield Guess(
                f"the norm with replicas counted once per rank of {' x '.join(axes)}",
                (math.hypot(*squares),),
                tuple(context.mesh.named(axes)),
                (("parameters_counted_again", again),),
            )


def _other_formulas(context: Context, gradients: Sequence[Compared], own: float) -> Iterator[Guess]:
    sizes = [item.measured.total.size for item in gradients]
    yield Guess("the sum of the squares, without the root", (own * own,))
    yield Guess("the sum of the norms of the parameters", (sum(sizes),))
    yield Guess("the largest norm of a parameter", (max(sizes),))
    for name, size in context.sizes.items():
        if size > 1:
            axes = tuple(context.mesh.named([name])) if name in context.mesh.sizes else ()
            for power, told in ((1.0, str(size)), (0.5, f"the root of {size}")):
                number = size**power
                yield Guess(f"{told} ({name}) times too large", (own * number,), axes)
                yield Guess(f"{told} ({name}) times too small", (own / number,), axes)


def _without_some(gradients: Sequence[Compared], own: float) -> Iterator[Guess]:
    """One parameter, or all whose names end alike, is left out or counted twice."""
    groups: dict[str, list[Compared]] = {}
    for item in gradients:
        groups.setdefault(item.row.name, []).append(item)
        parts = item.row.name.split(".")
        groups.setdefault(f"*.{parts[-1]}", []).append(item)
        if len(parts) > 1:
            groups.setdefault(f"*.{'.'.join(parts[-2:])}", []).append(item)
            groups.setdefault(f"{parts[0]}.*", []).append(item)
    for name, items in groups.items():
        square = math.hypot(*(item.measured.total.size for item in items)) ** 2
        if square < own * own:
            yield Guess(
                f"the norm without {name}",
                (math.sqrt(own * own - square),),
                detail=(("left_out", name),),
            )
        yield Guess(
            f"the norm with {name} counted twice",
            (math.sqrt(own * own + square),),
            detail=(("counted_twice", name),),
        )


def _finding(row: TensorRow, own: float, guess: Guess | None, step: int) -> Finding:
    assert row.worst_values is not None, "checked by the caller"
    value = row.worst_values[1]
    how = "" if guess is None else f" It is {guess.told}."
    left = None
    if guess is not None:
        nearest = min(guess.by_rank, key=lambda norm: abs(norm - value))
        per_eps = row.eps / row.rel_l2 if row.rel_l2 else 0.0
        left = abs(value - nearest) / abs(nearest) * per_eps if nearest else None
    return Finding(
        component="clipping",
        cause=WRONG_NORM if guess is None else guess.cause,
        tensor="norm",
        axes=[] if guess is None else list(guess.axes),
        evidence={
            "eps_before": row.eps,
            "eps_after": left,
            "share_beyond_2e-3": None,
            "reference": row.worst_values[0],
            "parallel": value,
            "of_own_gradients": own,
            "step": step,
            **({} if guess is None else dict(guess.detail)),
        },
        fix=f"norm is {value:.17g} in the parallel run; its own gradients have {own:.17g} and the "
        f"reference {row.worst_values[0]:.17g}.{how} The norm must count every element once, over "
        "all axes.",
    )
