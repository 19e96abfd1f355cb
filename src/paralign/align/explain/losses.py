"""Explain a loss or token count that is off: is only the number shown wrong, or the training?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from paralign.align.explain.candidates import (
    Candidate,
    axes_in,
    separate_sizes,
    sources_of,
    told_sizes,
)
from paralign.align.explain.context import Context
from paralign.align.explain.factors import CONSTANT_FACTOR, named_factor
from paralign.align.explain.own_vocabulary import explain_own_vocabulary
from paralign.align.trace import Kind, ScalarEntry
from paralign.align.verdict import Finding, TensorRow

REPORTED_VALUE = "reported_value"
TOKEN_WEIGHTING = "token_weighting"
DIFFERENT_DATA = "different_data"
FULL_SEQUENCE = "full_sequence"
UNKNOWN = "unknown"


def explain_tokens(context: Context, step: int) -> list[Finding]:
    """Explain a number of valid tokens that differs."""
    row = context.scalar("tokens", step)
    if row is None or row.ok or context.upstream:
        return []
    if _gradients_agree(context, step) and _loss_agrees(context, step):
        finding = _finding(row, "data", REPORTED_VALUE, None)
        finding.fix += (
            " Loss and gradients agree: only the count that is shown is wrong. Count each label "
            "once, over all ranks and micro-batches."
        )
        return [finding]
    factor = _factor(row)
    sources = [] if factor is None else sources_of(factor, context.sizes)
    on_axes = [source for source in sources if axes_in(source) == tuple(source)]
    if factor is None or abs(factor) <= 1 or not on_axes:
        finding = _finding(row, "data", DIFFERENT_DATA, None)
        finding.fix += " Give both runs the same batch, and count only labels not ignored."
        return [finding]
    return [_counted_twice(context, row, factor, on_axes)]


def _counted_twice(
    context: Context, row: TensorRow, factor: Fraction, sources: Sequence[tuple[str, ...]]
) -> Finding:
    """Tokens are there several times: the same rows on dp ranks, or whole sequences on cp ranks."""
    listed = []
    for source in sources:
        if any(axis in ("cp", "tp", "sp") for axis in source):
            listed.append(
                Candidate("data", FULL_SEQUENCE, source, "whole sequences where slices are due")
            )
        else:
            listed.append(
                Candidate("data", DIFFERENT_DATA, source, "the same rows on several ranks")
            )
    finding = _finding(row, "data", listed[0].cause, factor)
    finding.fix += (
        f" Exactly {factor} times: the size of {told_sizes(sources, context.sizes)}. Every token "
        "must be on one rank of dp and cp."
    )
    finding.axes = list(sources[0]) if len(sources) == 1 else []
    if len(listed) > 1:
        finding.candidates = list(map(str, listed))
        finding.separate_by = separate_sizes(sources)
    return finding


def explain_loss(context: Context, step: int) -> list[Finding]:
    """Explain a loss that is off while everything before it is right."""
    row = context.scalar("loss", step)
    if row is None or row.ok:
        return []
    agrees = _gradients_agree(context, step)
    if context.upstream and not agrees:
        return []
    factor = _factor(row)
    averaged = _averaged(context, step, row)
    if agrees:
        return [_reported(context, row, factor, averaged)]
    if averaged is not None:
        level, left = averaged
        finding = _finding(row, "loss", TOKEN_WEIGHTING, None)
        finding.evidence["eps_after"] = left * _per_eps(row)
        finding.fix += (
            f" It is the mean of the means of every {level}, however many tokens each has. Divide "
            "the sum of token losses by the number of valid tokens in the global batch."
        )
        return [finding]
    padded = _over_all_tokens(context, step, row)
    if padded is not None:
        return [padded]
    if factor is not None:
        return [_scaled(context, row, factor)]
    own = explain_own_vocabulary(context, step, row)
    if own is not None:
        return [own]
    finding = _finding(row, "loss", UNKNOWN, None)
    finding.fix += " The gradients below tell which part of the model the difference comes from."
    return [finding]


def _over_all_tokens(context: Context, step: int, row: TensorRow) -> Finding | None:
    """Return the finding that the sum over valid tokens was divided by all of them, if it was."""
    counted = valid_and_all(context, step)
    if counted is None or row.scale is None or row.budget_eps is None:
        return None
    factor = Fraction(*counted)
    left = abs(row.scale / float(factor) - 1) * _per_eps(row)
    if not left <= max(row.budget_eps, 1.0):
        return None
    finding = _finding(row, "loss", TOKEN_WEIGHTING, factor)
    finding.fix += f" {divided_by_all(*counted)}"
    return finding


def valid_and_all(context: Context, step: int) -> tuple[int, int] | None:
    """Return how many tokens of the global batch are valid, and how many it has; None: all are."""
    tokens = context.scalar("tokens", step)
    run = {**context.trace.facts.run, **context.reference.reader.facts.run}
    rows, length = run.get("global_batch"), run.get("seq_len")
    if tokens is None or tokens.worst_values is None:
        return None
    if not isinstance(rows, int) or not isinstance(length, int):
        return None
    valid, everything = int(tokens.worst_values[0]), rows * length
    return (valid, everything) if 0 < valid < everything else None


def divided_by_all(valid: int, everything: int) -> str:
    """Say what was divided by, and what to divide by."""
    return (
        f"It is divided by all {everything} tokens, {everything - valid} masked ones too: divide "
        f"by the {valid} valid ones."
    )


def _reported(
    context: Context,
    row: TensorRow,
    factor: Fraction | None,
    averaged: tuple[str, float] | None,
) -> Finding:
    """The gradients are right, so training is: the number was put together wrongly for show."""
    finding = _finding(row, "loss", REPORTED_VALUE, factor)
    finding.fix += " The gradients agree, so only the number that is shown is wrong:"
    if averaged is not None:
        finding.fix += f" it is the mean of the means of every {averaged[0]}. Weigh by tokens."
        return finding
    sources = [] if factor is None else sources_of(factor, context.sizes)
    if factor is None or not sources:
        finding.fix += " add up the parts of all ranks and micro-batches, and divide by all tokens."
        return finding
    finding.axes = list(axes_in(sources[0])) if len(sources) == 1 else []
    if len(sources) > 1:
        finding.candidates = _listed(REPORTED_VALUE, sources)
        finding.separate_by = separate_sizes(sources)
    if abs(factor) < 1:
        finding.fix += (
            f" it is divided by {told_sizes(sources, context.sizes)} once too often, as a mean "
            "over ranks that have no loss, or only a part of it, does."
        )
    else:
        finding.fix += (
            f" it is added up over {told_sizes(sources, context.sizes)}, where every rank has all "
            "of it."
        )
    return finding


def _scaled(context: Context, row: TensorRow, factor: Fraction) -> Finding:
    sources = sources_of(factor, context.sizes)
    finding = _finding(row, "loss", CONSTANT_FACTOR, factor)
    finding.axes = list(axes_in(sources[0])) if len(sources) == 1 else []
    told = told_sizes(sources, context.sizes)
    finding.fix += f" Exactly {factor} times" + (f", the size of {told}." if told else ".")
    finding.fix += " Divide once by the number of valid tokens in the global batch, and sum."
    if len(sources) > 1:
        finding.candidates = _listed(CONSTANT_FACTOR, sources)
        finding.separate_by = separate_sizes(sources)
    return finding


def _listed(cause: str, sources: Sequence[Sequence[str]]) -> list[str]:
    return [str(Candidate("loss", cause, axes_in(source))) for source in sources]


def _averaged(context: Context, step: int, row: TensorRow) -> tuple[str, float] | None:
    """Return what the loss is the plain mean of, if it is one, and the relative error left."""
    if row.worst_values is None or row.budget_eps is None:
        return None
    value = row.worst_values[1]
    for trace in (context.parallel.reader, context.reference.reader):
        parts = [
            (index.rank, entry)
            for index in trace.ranks
            for entry in index.scalars
            if (entry.kind, entry.step, entry.scope) == ("loss", step, "local")
            and entry.tokens
            and all(index.coordinates.get(axis, 0) == 0 for axis in entry.replicated_over)
        ]
        by_rank: dict[int, list[ScalarEntry]] = {}
        for rank, entry in parts:
            by_rank.setdefault(rank, []).append(entry)
        each = [[entry] for _, entry in parts]
        for level, groups in (("rank", list(by_rank.values())), ("micro-batch", each)):
            # Where all weigh alike, the plain mean is the right one and says nothing.
            counts = {sum(entry.tokens or 0 for entry in entries) for entries in groups}
            if len(counts) > 1:
                values = [_mean(entries) for entries in groups]
                left = abs(sum(values) / len(values) - value) / abs(row.worst_values[0] or 1.0)
                if left * _per_eps(row) <= row.budget_eps:
                    return level, left
    return None


def _mean(entries: Iterable[ScalarEntry]) -> float:
    total, tokens = 0.0, 0
    for entry in entries:
        count = entry.tokens or 0
        total += entry.value * count if entry.reduction == "mean" else entry.value
        tokens += count
    return total / tokens if tokens else math.nan


def _factor(row: TensorRow) -> Fraction | None:
    """Return the small number that the value is a multiple of, if it is one to its budget."""
    if row.scale is None or row.budget_eps is None:
        return None
    factor = named_factor(row.scale, row.budget_eps / _per_eps(row))
    if factor is None or factor == 1:
        return None
    left = abs(row.scale / float(factor) - 1) * _per_eps(row)
    return factor if left <= max(row.budget_eps, 1.0) else None


def _per_eps(row: TensorRow) -> float:
    """Return how many eps a relative error of one is."""
    return row.eps / row.rel_l2 if row.rel_l2 and math.isfinite(row.rel_l2) else 2.0**52


def _gradients_agree(context: Context, step: int) -> bool:
    """Whether gradients were compared and all are within budget."""
    judged = context.judged(Kind.GRAD, step)
    return bool(judged) and all(item.row.ok for item in judged)


def _loss_agrees(context: Context, step: int) -> bool:
    row = context.scalar("loss", step)
    return row is not None and row.ok


def _finding(row: TensorRow, component: str, cause: str, factor: Fraction | None) -> Finding:
    values = row.worst_values or (math.nan, math.nan)
    left = None
    if factor is not None and row.scale is not None:
        left = abs(row.scale / float(factor) - 1) * _per_eps(row)
    evidence: dict[str, object] = {
        "eps_before": row.eps,
        "eps_after": left,
        "share_beyond_2e-3": None,
        "reference": values[0],
        "parallel": values[1],
        "step": row.step,
    }
    if factor is not None:
        evidence["factor"] = str(factor)
    return Finding(
        component=component,
        cause=cause,
        tensor=row.name,
        evidence=evidence,
        fix=f"{row.kind} is {values[1]:.17g} in the parallel run and {values[0]:.17g} in the "
        "reference.",
    )
