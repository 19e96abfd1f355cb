"""Compare two recorded runs: is the parallel one the same training run as the reference?

Causal order: facts of the run, initial parameters, loss and valid tokens, gradients, gradient norm,
then moments, updates and parameters after the step; then the next step. The first thing out of
budget is explained.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paralign.align.activation_judge import ActivationJudge
from paralign.align.budget import Budget, Yardstick
from paralign.align.coverage import coverage_of
from paralign.align.error_profile import MOST_PROFILES, error_profile
from paralign.align.explain import Context, explain
from paralign.align.facts import fact_findings, fact_notes
from paralign.align.judge import Compared, Judge
from paralign.align.locate import Isolation, first_divergence
from paralign.align.name_rules import NameRule
from paralign.align.pair import Side
from paralign.align.pairing import pair_runs
from paralign.align.scalar_rows import ScalarJudge
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.align.verdict import (
    ALIGNED,
    INCONCLUSIVE,
    MISALIGNED,
    Coverage,
    Finding,
    Report,
    TensorRow,
)
from paralign.align.yardsticks import budget_for


def compare(
    reference: str | Path,
    parallel: str | Path,
    *,
    truth: str | Path | None = None,
    noise: str | Path | None = None,
    model: Callable[[], Any] | None = None,
    names: NameRule = None,
    allow_skipped: bool = False,
    config: Any = None,
) -> Report:
    """Compare the traces of two runs.

    Args:
        reference: Trace folder of the run to be equal to, on any mesh.
        parallel: Trace folder of the run under test, on any mesh.
        truth: Trace folder of the reference run in fp64, from the same weights and data. Then a run
            in fp32 or bf16 may be no further from it than a small multiple of the reference's own
            distance. Without it the budget of such runs is a measured table, and the report says
            *uncalibrated*.
        noise: Trace folder of a second run of the reference: with weights or inputs perturbed by an
            eps, or with its sums in another order. Then the parallel run may be no further from the
            reference than a small multiple of what this one is.
        model: Returns the model as it runs on one device, with the reference's names. Then, where
            module outputs were recorded, every module is run once more with what the parallel run
            computed before it, so that the report names those that are wrong by themselves.
        names: What the run under test calls parameters -> what the reference calls them, where
            content and position do not tell: old name or pattern -> new name or
            :class:`paralign.Fused`, or a function. ``*`` stands for any text.
        allow_skipped: Let what could not be compared not stand against ``aligned``.
        config: Anything JSON can hold, put into the report.

    Raises:
        TraceError: A folder is not a complete trace.
        ConfigError: The truth is not an fp64 run, there is one although the run is in fp64, both
            truth and noise are given, or ``names`` cannot be applied.
    """
    begin = time.perf_counter()
    with ExitStack() as stack:
        ours = stack.enter_context(TraceReader(reference))
        theirs = stack.enter_context(TraceReader(parallel))
        exact = None if truth is None else stack.enter_context(TraceReader(truth))
        second = None if noise is None else stack.enter_context(TraceReader(noise))
        budget = budget_for(theirs, exact, second)
        comparison = _Comparison(ours, theirs, exact, second, budget, names, allow_skipped)
        report = comparison.report()
        if model is not None:
            comparison.isolate(report, model)
    report.config = config
    report.timings["compare_s"] = time.perf_counter() - begin
    return report


class _Comparison:
    def __init__(
        self,
        reference: TraceReader,
        parallel: TraceReader,
        truth: TraceReader | None,
        noise: TraceReader | None,
        budget: Budget,
        names: NameRule,
        allow_skipped: bool,
    ) -> None:
        self._reference = reference
        self._parallel = parallel
        self._budget = budget
        self._allow_skipped = allow_skipped
        traces = [trace for trace in (reference, parallel, truth, noise) if trace is not None]
        self._steps = [
            step
            for step in reference.facts.steps
            if all(step in trace.facts.steps for trace in traces)
        ]
        self._base = Side(reference)
        self._pairing = pair_runs(
            self._base, parallel, step=min(self._steps, default=0), names=names
        )
        self._side = Side(parallel, self._pairing)
        self._judge = Judge(
            self._base,
            self._side,
            None if truth is None else Side(truth),
            budget,
            self._steps,
            noise=None if noise is None else Side(noise),
        )
        self._scalars = ScalarJudge(reference, parallel, truth, budget, self._steps, noise=noise)
        self._activations = ActivationJudge(
            reference,
            parallel,
            truth,
            budget,
            self._steps,
            noise=noise,
            rename=self._pairing.module,
        )

    def report(self) -> Report:
        self._judge.run()
        self._scalars.run()
        self._activations.run({step: self._agrees(step) for step in self._steps})
        facts = fact_findings(self._reference, self._parallel)
        self._profile_failures()
        rows = self._rows()
        coverage = coverage_of(
            self._reference,
            self._parallel,
            self._judge,
            self._pairing,
            self._steps,
            self._scalars.skipped,
        )
        findings = [*facts, *self._explain(facts)]
        verdict, why = self._decide(rows, coverage, facts)
        gated = [row for row in rows if row.budget_eps is not None and row.kind != Kind.PARAM]
        return Report(
            verdict=verdict,
            why=why,
            dtype=self._budget.dtype,
            yardstick=str(self._budget.yardstick),
            mesh=_mesh(self._parallel),
            loss=self._scalars.loss,
            coverage=coverage,
            worst=max(gated, key=lambda row: (row.strain, row.eps), default=None),
            tensors=rows,
            findings=findings,
            notes=[
                *fact_notes(self._reference, self._parallel),
                *self._pairing.notes,
                *self._judge.notes,
                *self._activations.notes,
            ],
            facts={"reference": _said(self._reference), "parallel": _said(self._parallel)},
            located=first_divergence(rows),
        )

    def isolate(self, report: Report, model: Callable[[], Any]) -> None:
        """Note in the report which modules are wrong by themselves, if anything is wrong.

        Raises:
            ConfigError: The model cannot be built or run, or is not the one that was recorded.
        """
        if report.located is None:
            report.notes.append("nothing is out of budget, so the model was not run")
            return
        step = report.located["step"]
        outputs = self._activations.outputs(step)
        if outputs is None:
            report.notes.append(
                "the model was not run: the parallel run recorded no module outputs. Record with "
                "what=(..., 'inputs', 'outputs', 'output_grads')"
            )
            return
        held, tokens = outputs
        isolation = Isolation(model, self._base, self._side, held, tokens, step, self._budget)
        report.located["isolated"] = [item.to_dict() for item in isolation.run()]

    def _agrees(self, step: int) -> bool:
        """Whether loss and gradients of a step were compared and are all within budget."""
        gradients = [
            item.row
            for item in self._judge.compared
            if (item.row.step, item.row.kind) == (step, Kind.GRAD)
        ]
        losses = [row for _, row in self._scalars.rows if (row.step, row.kind) == (step, "loss")]
        return bool(gradients) and all(row.ok for row in [*gradients, *losses])

    @property
    def _compared(self) -> list[Compared]:
        """Everything that was measured and is no scalar, in causal order."""
        items = [*self._judge.compared, *self._activations.compared]
        return sorted(items, key=lambda item: item.moment)

    def _profile_failures(self) -> None:
        """Say where in them the first failing tensors are off; what fails later follows from it."""
        # Tokens are found or not found; nothing is measured of them that a profile could show.
        failing = [i for i in self._compared if not i.row.ok and i.measured.by_rank]
        for item in failing[:MOST_PROFILES]:
            item.row.profile = error_profile(item.side, item.base, item.measured)

    def _rows(self) -> list[TensorRow]:
        """All rows in causal order; within a moment in the order of the model."""
        items = [(item.moment, item.row) for item in self._compared]
        items += self._scalars.rows
        return [row for _, row in sorted(items, key=lambda item: item[0])]

    def _decide(
        self, rows: list[TensorRow], coverage: Coverage, facts: list[Finding]
    ) -> tuple[str, str]:
        measured = [row for row in rows if row.kind != Kind.PARAM and row.budget_eps is not None]
        other_start = [row for row in rows if row.kind == Kind.PARAM and not row.ok]
        failing = [row for row in measured if not row.ok]
        remaps = self._pairing.remaps
        if other_start:
            told = f". {remaps[0]}" if remaps else ""
            return INCONCLUSIVE, (
                f"the runs start from different weights: {len(other_start)} of "
                f"{coverage.parameters} parameters differ, first {other_start[0].name}{told}"
            )
        if self._activations.other_data is not None:
            return INCONCLUSIVE, self._activations.other_data
        if self._judge.reference_problems:
            return INCONCLUSIVE, self._judge.reference_problems[0]
        if self._judge.largest_noise == 0.0:
            return INCONCLUSIVE, (
                "no budget: the noise run is the reference again, bit for bit, so it measures no "
                "rounding. Perturb its weights by an eps, or change the order of its sums"
            )
        if failing:
            return MISALIGNED, f"first out of budget: {_describe(failing[0])}"
        if remaps:
            return MISALIGNED, f"weights are not what their names say: {remaps[0]}"
        if facts:
            return MISALIGNED, f"the runs are configured differently: {facts[0].fix}"
        if not measured:
            return INCONCLUSIVE, "nothing was compared: " + (
                coverage.skipped[0]["why"] if coverage.skipped else "the traces hold no common step"
            )
        if not coverage.is_full and not self._allow_skipped:
            first = coverage.skipped[0]
            return INCONCLUSIVE, (
                f"{len(coverage.skipped)} things were not compared, first {first['name']}: "
                f"{first['why']}"
            )
        return ALIGNED, self._why_aligned(rows, measured)

    def _why_aligned(self, rows: list[TensorRow], measured: list[TensorRow]) -> str:
        worst = max(measured, key=lambda row: row.strain)
        elements = sum(self._judge.names.values())
        text = (
            f"{elements:,} elements in {len(measured)} comparisons, all within budget; closest to "
            f"it {_describe(worst)}"
        )
        listed = [row for row in rows if row.budget_eps is None]
        if self._budget.yardstick is Yardstick.UNCALIBRATED:
            text += (
                "; the budget is an uncalibrated table, until the fp64 run is given as truth or a "
                "second run of the reference as noise"
            )
        if listed:
            text += f"; {len(listed)} listed, not gated"
        return text

    def _explain(self, facts: list[Finding]) -> list[Finding]:
        """Name the causes of what is out of budget, after what the facts say."""
        context = Context(
            reference=self._base,
            parallel=self._side,
            compared=self._compared,
            scalars=self._scalars.rows,
            budget=self._budget,
            steps=self._steps,
            facts=facts,
        )
        return explain(context)


def _describe(row: TensorRow) -> str:
    return (
        f"{row.kind} {row.label} at step {row.step}, {row.eps:.3g} eps of a budget of "
        f"{row.budget_eps:.3g}"
    )


def _mesh(trace: TraceReader) -> dict[str, int]:
    return {axis: len(ranks) for axis, ranks in trace.ranks[0].axes.items()}


def _said(trace: TraceReader) -> dict[str, Any]:
    """Return what a run says about itself."""
    facts = trace.facts
    return {
        **facts.run,
        "world_size": facts.world_size,
        "mesh": _mesh(trace),
        "steps": len(facts.steps),
        "recorded": list(facts.what),
        "versions": dict(facts.versions),
    }
