"""Compare loss, valid tokens and gradient norm of every step, as rows next to the tensors'."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from paralign.align.budget import Budget
from paralign.align.pair import Moment
from paralign.align.scalars import StepLoss, step_loss, step_norms
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import EXACT, TensorRow

T = TypeVar("T")


class ScalarJudge:
    """Judges the numbers that ranks reported.

    Args:
        reference: The run to be equal to.
        parallel: The run under test.
        truth: An fp64 run of the same weights and data, or None.
        budget: The tolerances.
        steps: The steps that all of them recorded.
        noise: A second run of the reference, or None.
    """

    def __init__(
        self,
        reference: TraceReader,
        parallel: TraceReader,
        truth: TraceReader | None,
        budget: Budget,
        steps: Sequence[int],
        *,
        noise: TraceReader | None = None,
    ) -> None:
        self._reference = reference
        self._parallel = parallel
        self._truth = truth
        self._noise = noise
        self._budget = budget
        self._steps = steps
        self.rows: list[tuple[Moment, TensorRow]] = []
        self.skipped: list[dict[str, str]] = []
        self.loss: dict[str, float] | None = None
        """Of the step whose loss is furthest off."""

    def run(self) -> None:
        """Compare every step; fills the public attributes."""
        for step in self._steps:
            if self._both("loss"):
                self._compare_losses(step)
            if self._both("norm"):
                self._compare_norms(step)

    def _both(self, what: str) -> bool:
        """Whether both sides meant to record it; otherwise the lack is noted once."""
        has = [what in trace.facts.what for trace in (self._reference, self._parallel)]
        if any(has) and not all(has):
            side = "reference" if has[1] else "parallel run"
            note = {"name": what, "why": f"not recorded in the {side}"}
            if note not in self.skipped:
                self.skipped.append(note)
        return all(has)

    def _compare_losses(self, step: int) -> None:
        found = self._reported(step, "loss", step_loss)
        if found is None:
            self._miss_loss(step)
            return
        reference, parallel, truth = found
        self._compare_tokens(step, reference, parallel)
        if reference.is_mean != parallel.is_mean:
            self._skip(
                step, "loss", "one side reports a sum without its tokens. Pass tokens=n to rec.loss"
            )
            return
        truth_value = None if truth is None else truth.values[0]
        row = self._row(step, "loss", reference.values[0], parallel.values, truth_value)
        if row.worst_values is not None and (
            self.loss is None or not row.rel_l2 <= self.loss["rel"]
        ):
            self.loss = {
                "reference": row.worst_values[0],
                "parallel": row.worst_values[1],
                "rel": _relative(row.worst_values[1], row.worst_values[0]),
                "step": step,
            }

    def _miss_loss(self, step: int) -> None:
        self._skip(
            step,
            "loss",
            "not reported. Call rec.loss(...) on one rank at least, before optimizer.step()",
        )

    def _compare_tokens(self, step: int, reference: StepLoss, parallel: StepLoss) -> None:
        if not reference.tokens or not parallel.tokens:
            return
        expected = reference.tokens[0]
        count = next((n for n in parallel.tokens if n != expected), expected)
        moment = Moment.of(step, "tokens")
        relative = _relative(float(count), float(expected))
        row = TensorRow(
            kind="tokens",
            name="tokens",
            step=step,
            rel_l2=relative,
            eps=relative / self._budget.eps,
            budget_eps=0.0,
            cosine=None,
            scale=_ratio(float(count), float(expected)),
            worst_index=None,
            ok=count == expected,
            paired_by=None,
            category=EXACT,
            worst_values=(float(expected), float(count)),
        )
        self.rows.append((moment, row))

    def _compare_norms(self, step: int) -> None:
        norms = [step_norms(trace, step) for trace in (self._reference, self._parallel)]
        if not any(norms):
            return  # nobody clips
        found = self._reported(step, "norm", lambda trace, at: step_norms(trace, at) or None)
        if found is None:
            side = "parallel run" if norms[0] and not norms[1] else "reference"
            if all(norms):
                side = "truth"
            self._skip(step, "norm", f"not reported in the {side}. Call rec.norm(value)")
            return
        reference, parallel, truth = found
        self._row(step, "norm", reference[0], parallel, None if truth is None else truth[0])

    def _reported(
        self, step: int, kind: str, read: Callable[[TraceReader, int], T | None]
    ) -> tuple[T, T, T | None] | None:
        reference, parallel = read(self._reference, step), read(self._parallel, step)
        truth = None if self._truth is None else read(self._truth, step)
        if reference is None or parallel is None or (self._truth and truth is None):
            return None
        return reference, parallel, truth

    def _row(
        self,
        step: int,
        kind: str,
        reference: float,
        values: Sequence[float],
        truth: float | None,
    ) -> TensorRow:
        """Add the row of the value that is furthest off; every rank's counts."""
        base = reference if truth is None else truth
        own = self._noise_of(step, kind, reference)
        if truth is not None:
            own = _relative(reference, truth)
        relative, value = max(
            ((_relative(value, base), value) for value in values),
            key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0],
        )
        tolerance = self._budget.scalar(kind, after_step=step > min(self._steps), own=own)
        row = TensorRow(
            kind=kind,
            name=kind,
            step=step,
            rel_l2=relative,
            eps=relative / self._budget.eps,
            budget_eps=tolerance / self._budget.eps,
            cosine=None,
            scale=_ratio(value, base),
            worst_index=None,
            ok=relative <= tolerance,
            paired_by=None,
            worst_values=(base, value),
        )
        self.rows.append((Moment.of(step, kind), row))
        return row

    def _noise_of(self, step: int, kind: str, reference: float) -> float | None:
        """Return how far the reference's second run is from it; no run tells nothing."""
        if self._noise is None:
            return None
        second: float | None = None
        if kind == "loss":
            loss = step_loss(self._noise, step)
            second = None if loss is None else loss.values[0]
        elif norms := step_norms(self._noise, step):
            second = norms[0]
        return 0.0 if second is None else _relative(second, reference)

    def _skip(self, step: int, name: str, why: str) -> None:
        self.skipped.append({"name": name, "why": f"step {step}: {why}"})


def _relative(value: float, base: float) -> float:
    if math.isnan(value) or math.isnan(base):
        return math.nan
    if value == base:
        return 0.0
    return abs(value - base) / abs(base) if base else math.inf


def _ratio(value: float, base: float) -> float | None:
    ratio = value / base if base else math.nan
    return ratio if math.isfinite(ratio) else None
