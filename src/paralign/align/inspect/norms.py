"""A reported gradient norm that is not the norm of the recorded gradients, and what it is instead.

The norm of the whole counts every element once. A rank that adds up squares over some axes only
counts shards over the other axes too rarely and replicas over these axes too often; which axes it
added over is found by trying all sets of them on the recorded pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paralign.align.inspect.factors import explain_factor, simple_factor
from paralign.align.inspect.replicas import copies_agree
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import Held, View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_MOST_AXES = 6


@dataclass(frozen=True)
class _Explanation:
    axes: tuple[str, ...]
    told: str
    cause: str = "wrong_norm"
    tensor: str | None = None


def check_norms(view: View) -> Check:
    """Hold every reported norm against the norm of the recorded gradients."""
    check = Check("norm")
    for step in view.steps:
        reported = _reported(view, step)
        if not reported:
            continue
        problem = _cannot_tell(view, step)
        if problem is not None:
            check.why_not = f"step {step}: {problem}"
            continue
        check.looked_at += len(reported)
        check.findings += _judge(view, step, reported)
        if check.findings:
            break
    if not check.looked_at and check.why_not is None:
        check.why_not = "no gradient norm was reported"
    return check


def _reported(view: View, step: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for index in view.reader.ranks:
        for entry in index.scalars:
            if entry.kind == "norm" and entry.step == step:
                found.setdefault(index.rank, []).append(entry.value)
    return found


def _cannot_tell(view: View, step: int) -> str | None:
    gradients = view.tensors(Kind.GRAD, step)
    if not gradients:
        return "no gradients were recorded to hold the norm against"
    for name, held in gradients.items():
        if any(piece.entry.file and view.fingerprint(piece).nonfinite for piece in held):
            return f"the gradient of {name} is not finite"
        if not copies_agree(view, held):
            return f"replicas of the gradient of {name} disagree, so there is no one norm"
    return None


def _judge(view: View, step: int, reported: Mapping[int, Sequence[float]]) -> Iterator[Finding]:
    """Yield one finding per way in which reports are wrong."""
    parts = view.gradient_norms(step)
    true = math.hypot(*parts.values())
    limit = view.scalar_tolerance("norm")
    wrong: dict[_Explanation | None, dict[int, float]] = {}
    for rank, values in reported.items():
        whole = math.hypot(*values)
        if _near(values[-1], true, limit) or (len(values) > 1 and _near(whole, true, limit)):
            continue
        value = values[-1]
        explanation = _explain(view, step, rank, value, true, parts)
        wrong.setdefault(explanation, {})[rank] = value
    for explanation, values_of in wrong.items():
        yield _finding(view, step, explanation, values_of, true, len(reported))


def _explain(
    view: View, step: int, rank: int, value: float, true: float, parts: Mapping[str, float]
) -> _Explanation | None:
    """Return the first hypothesis that the reported number bears out."""
    limit = view.scalar_tolerance("norm")
    hypotheses = itertools.chain(
        _by_axes(view, step, rank, value),
        _by_tensor(value, true, parts, limit),
        _by_kind_of_norm(view, step, value, parts),
        _by_factor(view, value, true),
    )
    return next(hypotheses, None)


def _by_axes(view: View, step: int, rank: int, value: float) -> Iterator[_Explanation]:
    """Try: squares of the ranks' own pieces, added up over some axes and not over others."""
    limit = view.scalar_tolerance("norm")
    own = _squares_by_rank(view, step)
    axes = list(view.axes)[:_MOST_AXES]
    for size in range(len(axes) + 1):
        for summed in itertools.combinations(axes, size):
            group = view.reach(rank, summed)
            total = math.sqrt(math.fsum(own.get(peer, 0.0) for peer in group))
            if not _near(value, total, limit):
                continue
            missing, doubled = _missing_and_doubled(view, step, rank, summed)
            told = []
            if missing:
                told.append(
                    f"it was not added up over {', '.join(missing)}, where the ranks hold "
                    "different gradients"
                )
            if doubled:
                told.append(
                    f"it was added up over {', '.join(doubled)} as if all ranks there held "
                    "different gradients, so that copies count more than once"
                )
            if told:
                yield _Explanation((*missing, *doubled), "; ".join(told))


def _squares_by_rank(view: View, step: int) -> dict[int, float]:
    """Return per rank the sum of squares of what it holds, each of its pieces once."""
    squares: dict[int, dict[Hashable, float]] = {}
    for name, held in view.tensors(Kind.GRAD, step).items():
        for piece in held:
            if piece.entry.file is not None:
                mine = squares.setdefault(piece.rank, {})
                mine.setdefault((name, piece.place), view.fingerprint(piece).norm ** 2)
    return {rank: math.fsum(mine.values()) for rank, mine in squares.items()}


def _missing_and_doubled(
    view: View, step: int, rank: int, summed: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the axes of wrongly left out shards, and those of wrongly added copies."""
    missing, doubled = [], []
    for axis in view.axes:
        shards = copies = False
        for held in view.tensors(Kind.GRAD, step).values():
            kinds = _along(view, held, axis)
            shards, copies = shards or kinds[0], copies or kinds[1]
        if shards and axis not in summed:
            missing.append(axis)
        if copies and axis in summed:
            doubled.append(axis)
    return missing, doubled


def _along(view: View, held: Sequence[Held], axis: str) -> tuple[bool, bool]:
    """Say whether peers along ``axis`` hold different pieces of a tensor, and whether the same."""
    places: dict[int, set[Hashable]] = {}
    for piece in held:
        if piece.entry.file is not None and view.fingerprint(piece).elements:
            places.setdefault(piece.rank, set()).add(piece.place)
    shards = copies = False
    for rank, mine in places.items():
        for peer in view.group(rank, axis):
            if peer == rank:
                continue
            theirs = places.get(peer)
            if theirs is None or theirs != mine:
                shards = True
            else:
                copies = True
    return shards, copies


def _by_tensor(
    value: float, true: float, parts: Mapping[str, float], limit: float
) -> Iterator[_Explanation]:
    """Try: one parameter, or all of one kind, left out or counted twice."""
    difference = value**2 - true**2
    resolution = 4 * limit * true**2
    if not abs(difference) > resolution:
        return
    groups: dict[str, float] = {name: norm**2 for name, norm in parts.items()}
    for name, norm in parts.items():
        kind = name.rpartition(".")[0].rpartition(".")[2] or name
        groups[f"*.{kind}.*"] = groups.get(f"*.{kind}.*", 0.0) + norm**2
    for name, square in groups.items():
        if square > resolution and abs(abs(difference) - square) <= resolution:
            told = f"it counts {name} twice" if difference > 0 else f"it leaves out {name}"
            yield _Explanation((), told, tensor=name)


def _by_kind_of_norm(
    view: View, step: int, value: float, parts: Mapping[str, float]
) -> Iterator[_Explanation]:
    """Try: the largest element, or a sum of norms where a norm of norms belongs."""
    limit = view.scalar_tolerance("norm")
    largest = max(
        view.fingerprint(piece).largest
        for held in view.tensors(Kind.GRAD, step).values()
        for piece in held
        if piece.entry.file is not None
    )
    if _near(value, largest, limit):
        yield _Explanation((), "it is the largest element, not the norm")
    if len(parts) > 1 and _near(value, math.fsum(parts.values()), limit):
        yield _Explanation((), "it is the sum of the parameters' norms, not of their squares")
    if _near(value, math.hypot(*parts.values()) ** 2, limit):
        yield _Explanation((), "it is the sum of squares, of which no root was taken")
    own = _squares_by_rank(view, step)
    if len(own) > 1 and _near(value, math.fsum(math.sqrt(s) for s in own.values()), limit):
        yield _Explanation(
            tuple(view.axes), "it is the sum of the ranks' norms, not of their squares"
        )


def _by_factor(view: View, value: float, true: float) -> Iterator[_Explanation]:
    limit = view.scalar_tolerance("norm")
    ratio = value / true if true else math.nan
    for power, words in ((1, ""), (2, "the root of ")):
        factor = simple_factor(ratio**power, limit * power)
        if factor is None:
            continue
        sets = explain_factor(factor, view.axes)
        axes = sets[0] if len(sets) == 1 else ()
        yield _Explanation(
            axes,
            f"it is {words}{factor} times the norm of the gradients that the optimizer used: the "
            "gradients were scaled between the two, or the norm was",
            "constant_factor",
        )


def _finding(
    view: View,
    step: int,
    explanation: _Explanation | None,
    values: Mapping[int, float],
    true: float,
    num_reports: int,
) -> Finding:
    value = next(iter(values.values()))
    everyone = "every rank" if len(values) == num_reports else "rank " + ", ".join(map(str, values))
    told = (
        f"The gradient norm that {everyone} reported at step {step} is {value:.9g}, but the "
        f"gradients' norm is {true:.9g}"
    )
    reason = f": {explanation.told}" if explanation else ", and no part of them has this norm"
    return Finding(
        component="clipping",
        cause=explanation.cause if explanation else "wrong_norm",
        tensor=explanation.tensor if explanation else None,
        axes=list(explanation.axes) if explanation else [],
        evidence={
            "step": step,
            "reported": {str(at): number for at, number in values.items()},
            "norm": true,
            "ratio": value / true if true else None,
        },
        fix=f"{told}{reason}. Count every element once: add squares over the axes along which "
        "gradients are sharded (pp included), and over no others; then take the root.",
    )


def _near(value: float, expected: float, limit: float) -> bool:
    if value == expected:
        return True
    return abs(value - expected) <= limit * abs(expected)
