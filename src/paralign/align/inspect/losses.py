"""A reported loss that is not what its parts add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paralign.align.inspect.factors import explain_factor, simple_factor
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import View
from paralign.align.trace import RankIndex, ScalarEntry
from paralign.align.verdict import Finding

_Part = tuple[int, ScalarEntry]


def check_losses(view: View) -> Check:
    """Hold what ranks call the step's loss against each other and against the parts."""
    check = Check("loss")
    for step in view.steps:
        reports = [
            (index.rank, entry)
            for index in view.reader.ranks
            for entry in index.scalars
            if entry.kind == "loss" and entry.step == step
        ]
        check.looked_at += len(reports)
        whole = [(rank, entry) for rank, entry in reports if entry.scope == "global"]
        parts = [(rank, entry) for rank, entry in reports if entry.scope == "local"]
        check.findings += [
            *_not_finite(step, reports),
            *_ranks_disagree(view, step, whole),
            *_copies_disagree(view, step, parts),
            *_too_many_tokens(view, step, whole, parts),
        ]
        if not check.findings and whole and parts:
            check.findings += _not_the_sum(view, step, whole, parts)
        if check.findings:
            break
    if not check.looked_at:
        check.why_not = "no loss was reported"
    return check


def _not_finite(step: int, reports: Sequence[_Part]) -> Iterator[Finding]:
    bad = sorted({rank for rank, entry in reports if not math.isfinite(entry.value)})
    if bad:
        empty = [rank for rank, entry in reports if rank in bad and entry.tokens == 0]
        yield Finding(
            component="loss",
            cause="token_weighting" if empty else "unknown",
            tensor="loss",
            evidence={"step": step, "ranks": bad, "ranks_without_tokens": empty},
            fix=f"The loss is not finite on rank {', '.join(map(str, bad))} at step {step}. "
            + (
                "These ranks have no valid token: a mean over none is 0/0. Divide a sum by the "
                "global number of tokens."
                if empty
                else "Look for an overflow, or a row whose mask hides everything."
            ),
        )


def _ranks_disagree(view: View, step: int, whole: Sequence[_Part]) -> Iterator[Finding]:
    """All ranks call their number the loss of the whole step, so it has to be the same."""
    for what, value_of in (("loss", _per_token), ("tokens", lambda e: float(e.tokens or 0))):
        values = {rank: value_of(entry) for rank, entry in whole}
        if len(values) < 2 or not all(math.isfinite(value) for value in values.values()):
            continue
        base = next(iter(values.values()))
        limit = view.scalar_tolerance("loss") if what == "loss" else 0.0
        said = {
            rank: 0.0 if abs(value - base) <= limit * abs(base) else value
            for rank, value in values.items()
        }
        split = view.split(said)
        if split is None:
            continue
        component = "loss" if what == "loss" else "data"
        yield Finding(
            component=component,
            cause="reported_value" if what == "loss" else "different_data",
            tensor=what,
            axes=list(split.axes),
            evidence={
                "step": step,
                "values": {str(rank): value for rank, value in values.items()},
                "classes": [list(ranks) for ranks in split.classes],
            },
            fix=f"Ranks report different numbers as the whole step's {what} at step {step} "
            f"({min(values.values()):.9g} to {max(values.values()):.9g}). Add the parts up over "
            f"{', '.join(split.axes) or 'the ranks'}, or report them with scope='local'.",
        )
        return


def _copies_disagree(view: View, step: int, parts: Sequence[_Part]) -> Iterator[Finding]:
    """Ranks that hold the same part (tp) have to report the same of it."""
    calls: dict[tuple[frozenset[int], int], dict[int, float]] = {}
    numbers: dict[int, int] = {}
    for rank, entry in parts:
        number = numbers.get(rank, 0)
        numbers[rank] = number + 1
        if entry.replicated_over:
            group = view.reach(rank, entry.replicated_over)
            calls.setdefault((group, number), {})[rank] = entry.value
    for values in calls.values():
        base = next(iter(values.values()))
        limit = view.scalar_tolerance("loss")
        said = {
            rank: 0.0 if abs(value - base) <= limit * abs(base) else value
            for rank, value in values.items()
        }
        split = view.split(said)
        if split is not None:
            axes = list(split.axes)
            yield Finding(
                component="loss",
                cause="single_rank" if split.loners else "missing_reduction",
                tensor="loss",
                axes=axes,
                evidence={
                    "step": step,
                    "values": {str(rank): value for rank, value in values.items()},
                },
                fix=f"Ranks of {', '.join(axes) or 'one group'} compute the same tokens but "
                f"different losses at step {step}: {min(values.values()):.9g} to "
                f"{max(values.values()):.9g}. A reduction over {', '.join(axes) or 'them'} is "
                "missing in the forward, or they were given different samples.",
            )
            return


def _too_many_tokens(
    view: View, step: int, whole: Sequence[_Part], parts: Sequence[_Part]
) -> Iterator[Finding]:
    run = view.reader.facts.run
    rows, length = run.get("global_batch"), run.get("seq_len")
    if not isinstance(rows, int) or not isinstance(length, int):
        return
    counts = [entry.tokens for _, entry in whole if entry.tokens is not None]
    own = _own_parts(view.reader.ranks, parts)
    if not counts and own and all(entry.tokens is not None for _, entry in own):
        counts = [sum(entry.tokens or 0 for _, entry in own)]
    most = max(counts, default=0)
    if most <= rows * length:
        return
    factor = simple_factor(most / (rows * length), 0.0)
    sets = explain_factor(factor, view.axes) if factor is not None else []
    yield Finding(
        component="data",
        cause="constant_factor" if factor is not None else "different_data",
        tensor="tokens",
        axes=list(sets[0]) if len(sets) == 1 else [],
        evidence={"step": step, "tokens": most, "global_batch": rows, "seq_len": length},
        fix=f"{most} valid tokens were counted at step {step}, more than global_batch={rows} rows "
        f"of seq_len={length}. Ranks that hold the same tokens count them once.",
        candidates=[" x ".join(axes) for axes in sets] if len(sets) > 1 else [],
    )


@dataclass(frozen=True)
class _Hypothesis:
    value: float
    cause: str
    axes: tuple[str, ...]
    told: str


def _not_the_sum(
    view: View, step: int, whole: Sequence[_Part], parts: Sequence[_Part]
) -> Iterator[Finding]:
    own = _own_parts(view.reader.ranks, parts)
    total, tokens = _total(own)
    if total is None:
        return
    per_token = all(entry.reduction == "mean" or entry.tokens for _, entry in whole)
    if tokens is None and per_token and any(e.reduction == "mean" for _, e in whole):
        return  # sums without their tokens against a mean: nothing to hold it against
    expected = total / tokens if tokens and per_token else total
    rank, entry = whole[0]
    value = _per_token(entry) if per_token else entry.value
    limit = view.scalar_tolerance("loss") * 4
    if abs(value - expected) <= limit * abs(expected):
        return
    found = next(
        (
            hypothesis
            for hypothesis in _hypotheses(view, own, expected, value)
            if abs(value - hypothesis.value) <= limit * abs(hypothesis.value)
        ),
        None,
    )
    reason = f": it is {found.told}" if found else ""
    yield Finding(
        component="loss",
        cause=found.cause if found else "reported_value",
        tensor="loss",
        axes=list(found.axes) if found else [],
        evidence={
            "step": step,
            "reported": value,
            "from_parts": expected,
            "ratio": value / expected if expected else None,
        },
        fix=f"Rank {rank} reports {value:.9g} as the loss of step {step}, but its parts, weighted "
        f"by tokens, give {expected:.9g}{reason}. Divide the sum over all valid tokens by their "
        "number: over micro-batches, dp and cp ranks, each token once.",
    )


def _hypotheses(
    view: View, own: Sequence[_Part], expected: float, value: float
) -> Iterator[_Hypothesis]:
    means = [mean for _, entry in own if (mean := _mean(entry)) is not None]
    if len(means) == len(own) and len(means) > 1:
        yield _Hypothesis(
            math.fsum(means) / len(means),
            "token_weighting",
            _axes_of_parts(view, own),
            "the mean of the parts' means, which weighs parts with few tokens too much",
        )
    for axis in view.axes:
        rest = [(rank, entry) for rank, entry in own if view.coordinate(rank, axis) == 0]
        total, tokens = _total(rest)
        if total is not None and len(rest) < len(own):
            mean = total / tokens if tokens else total
            yield _Hypothesis(
                mean, "missing_reduction", (axis,), f"that of the first rank of {axis} alone"
            )
    factor = simple_factor(value / expected if expected else math.nan, 1e-6)
    if factor is not None:
        sets = explain_factor(factor, view.axes)
        axes = sets[0] if len(sets) == 1 else ()
        over = f", the size of {' or of '.join(' x '.join(a) for a in sets)}" if sets else ""
        yield _Hypothesis(
            expected * float(factor),
            "constant_factor",
            axes,
            f"{factor} times that{over}: averaged over ranks that have no part, or added up over "
            "ranks that have the same",
        )


def _axes_of_parts(view: View, own: Sequence[_Part]) -> tuple[str, ...]:
    split = view.split({rank: rank for rank, _ in own})
    return split.axes if split else ()


def _own_parts(ranks: Sequence[RankIndex], parts: Sequence[_Part]) -> list[_Part]:
    """Return the parts, of ranks with the same part (tp) only the first one's."""
    return [
        (rank, entry)
        for rank, entry in parts
        if all(ranks[rank].coordinates.get(axis, 0) == 0 for axis in entry.replicated_over)
    ]


def _total(parts: Sequence[_Part]) -> tuple[float | None, int | None]:
    if not parts:
        return None, None
    if any(entry.reduction == "mean" and entry.tokens is None for _, entry in parts):
        return None, None
    total = math.fsum(
        entry.value * (entry.tokens or 0) if entry.reduction == "mean" else entry.value
        for _, entry in parts
    )
    if any(entry.tokens is None for _, entry in parts):
        return total, None
    return total, sum(entry.tokens or 0 for _, entry in parts)


def _mean(entry: ScalarEntry) -> float | None:
    if entry.reduction == "mean":
        return entry.value
    return entry.value / entry.tokens if entry.tokens else None


def _per_token(entry: ScalarEntry) -> float:
    return entry.value / entry.tokens if entry.reduction == "sum" and entry.tokens else entry.value
