"""Inspect a trace: run every check and put their findings together, in causal order."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paralign.align.inspect.clipping import check_clipping
from paralign.align.inspect.experts import check_experts
from paralign.align.inspect.gradients import check_gradients
from paralign.align.inspect.inputs import check_inputs
from paralign.align.inspect.labels import check_labels
from paralign.align.inspect.losses import check_losses
from paralign.align.inspect.norms import check_norms
from paralign.align.inspect.ranks import check_ranks
from paralign.align.inspect.replicas import check_replicas
from paralign.align.inspect.report import CLEAN, FINDINGS, INCONCLUSIVE, Check, InspectReport
from paralign.align.inspect.updates import check_updates
from paralign.align.inspect.view import View
from paralign.align.inspect.weights import check_weights
from paralign.align.trace_reader import TraceReader

# As a step makes what they look at, so that the first finding is the one to begin with.
_CHECKS: tuple[Callable[[View], Check], ...] = (
    check_ranks,
    check_inputs,
    check_labels,
    check_weights,
    check_experts,
    check_losses,
    check_gradients,
    check_replicas,
    check_norms,
    check_clipping,
    check_updates,
)


def inspect(trace: str | Path, *, unused: Sequence[str] = ()) -> InspectReport:
    """Look for contradictions within one recorded run; no reference is needed.

    What it cannot see: anything that is wrong in the same way on every rank and consistent with
    itself. For that, compare with a reference.

    Args:
        trace: Trace folder of the run.
        unused: Patterns (``fnmatch``) of parameters that the model does not use, so that they may
            have no gradient.

    Raises:
        TraceError: The folder is not a complete trace.
    """
    begin = time.perf_counter()
    with TraceReader(trace) as reader:
        view = View(reader, unused=unused)
        checks = [check(view) for check in _CHECKS]
        report = _report(view, str(trace), checks)
    report.timings["inspect_s"] = time.perf_counter() - begin
    return report


def _report(view: View, trace: str, checks: Sequence[Check]) -> InspectReport:
    findings = [finding for check in checks for finding in check.findings]
    notes = [note for check in checks for note in check.notes]
    notes += [
        f"rank {index.rank} did not record {item['name']}: {item['why']}"
        for index in view.reader.ranks
        for item in index.not_recorded
    ]
    judged = [check for check in checks if check.looked_at]
    if findings:
        verdict = FINDINGS
        why = f"{len(findings)} findings, first {findings[0].component}: {findings[0].cause}"
    elif judged:
        verdict = CLEAN
        why = f"nothing contradicts itself in {', '.join(check.name for check in judged)}"
        left = [check.name for check in checks if not check.looked_at]
        why += f"; could not judge {', '.join(left)}" if left else ""
    else:
        verdict = INCONCLUSIVE
        why = "the trace holds nothing that could be checked without a reference"
    return InspectReport(
        verdict=verdict,
        why=why,
        trace=trace,
        world_size=view.world_size,
        dtype=view.dtype,
        mesh={axis: len(ranks) for axis, ranks in view.reader.ranks[0].axes.items()},
        findings=findings,
        checks=list(checks),
        notes=list(dict.fromkeys(notes)),
    )
