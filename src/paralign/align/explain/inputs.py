"""Explain what ranks were fed: slices, samples, labels and positions, before any computed number.

Most of it needs no reference, because the run contradicts itself: the checks of ``inspect`` are
asked first. What they do not see is held against the reference's inputs.
"""

from __future__ import annotations

from paralign.align.explain.context import Context
from paralign.align.explain.proof import evidence
from paralign.align.inspect.inputs import check_inputs
from paralign.align.inspect.labels import check_labels
from paralign.align.inspect.view import View
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

DIFFERENT_DATA = "different_data"
MASK_OR_POSITIONS = "mask_or_positions"


def explain_inputs(context: Context, step: int) -> list[Finding]:
    """Explain the inputs of ``step``: one finding per cause, however many groups of ranks it is."""
    judged = {item.row.name for item in context.judged(Kind.INPUT, step)}
    if judged >= {"tokens", "labels"} and not context.failing(Kind.INPUT, step):
        return []  # they are the reference's: what looks odd about them is odd in both runs
    view = View(context.trace)
    found: dict[tuple[str, str, tuple[str, ...]], Finding] = {}
    for check in (check_inputs(view), check_labels(view)):
        for finding in check.findings:
            if finding.evidence.get("step", step) != step:
                continue
            key = (finding.component, finding.cause, tuple(finding.axes))
            first = found.setdefault(key, finding)
            if first is not finding:
                _join(first, finding)
    if found:
        return list(found.values())
    return [_differing(context, item) for item in context.failing(Kind.INPUT, step)[:1]]


def _join(first: Finding, other: Finding) -> None:
    """Note that another group of ranks shows the same."""
    ranks = {*first.evidence.get("ranks", []), *other.evidence.get("ranks", [])}
    first.evidence["ranks"] = sorted(ranks)
    first.evidence["groups"] = first.evidence.get("groups", 1) + 1


def _differing(context: Context, item: Compared) -> Finding:
    name, ranks = item.row.name, item.row.ranks_off
    axes = list(context.mesh.named(context.mesh.axes_of(ranks))) if len(ranks) > 1 else []
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    if name == "positions":
        cause, fix = MASK_OR_POSITIONS, "Give every token its place in the whole sequence."
    else:
        cause, fix = DIFFERENT_DATA, "Give both runs the same batch."
    return Finding(
        component="data",
        cause=cause,
        tensor=name,
        axes=axes,
        evidence={**evidence(item, None), "ranks": ranks, "step": item.row.step},
        fix=f"{name} are others than the reference's{where}. {fix}",
    )
