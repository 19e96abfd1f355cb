"""Put together what ranks reported of a step: its loss, valid tokens and gradient norm."""

from __future__ import annotations

from dataclasses import dataclass

from paralign.align.trace import RankIndex, ScalarEntry
from paralign.align.trace_reader import TraceReader


@dataclass(frozen=True)
class StepLoss:
    """The loss of one step, as every rank that knows it reports it."""

    values: tuple[float, ...]
    tokens: tuple[int, ...]
    is_mean: bool
    """Over the step's tokens; otherwise a bare sum."""


def step_loss(trace: TraceReader, step: int) -> StepLoss | None:
    """Return the loss of ``step``; None if no rank reported one.

    Reports of the whole step count as they are. Parts are added up over ranks and calls; of ranks
    that hold the same part (tp) the first counts.
    """
    reports = _reports(trace, "loss", step)
    whole = [entry for _, entry in reports if entry.scope == "global"]
    if whole:
        by_tokens = all(entry.tokens for entry in whole if entry.reduction == "sum")
        return StepLoss(
            tuple(_per_token(entry) if by_tokens else entry.value for entry in whole),
            tuple(entry.tokens for entry in whole if entry.tokens is not None),
            by_tokens,
        )
    parts = [entry for index, entry in reports if _is_first_replica(index, entry)]
    if not parts:
        return None
    total = sum(
        entry.value * (entry.tokens or 0) if entry.reduction == "mean" else entry.value
        for entry in parts
    )
    if any(entry.tokens is None for entry in parts):
        return StepLoss((total,), (), False)
    tokens = sum(entry.tokens or 0 for entry in parts)
    return StepLoss((total / tokens if tokens else float("nan"),), (tokens,), True)


def step_norms(trace: TraceReader, step: int) -> tuple[float, ...]:
    """Return every gradient norm that a rank reported for ``step``."""
    return tuple(entry.value for _, entry in _reports(trace, "norm", step))


def _reports(trace: TraceReader, kind: str, step: int) -> list[tuple[RankIndex, ScalarEntry]]:
    return [
        (index, entry)
        for index in trace.ranks
        for entry in index.scalars
        if entry.kind == kind and entry.step == step
    ]


def _per_token(entry: ScalarEntry) -> float:
    return entry.value / entry.tokens if entry.reduction == "sum" and entry.tokens else entry.value


def _is_first_replica(index: RankIndex, entry: ScalarEntry) -> bool:
    return all(index.coordinates.get(axis, 0) == 0 for axis in entry.replicated_over)
