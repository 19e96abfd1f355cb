"""One judged thing as a case: what JUnit and the page of many runs show, whoever judged it.

A comparison is one case; a sweep has one per mesh, a drill one per fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paralign.align.verdict import ALIGNED, INCONCLUSIVE, MISALIGNED, Finding, Report

PASSED = "passed"
FAILED = "failed"
UNDECIDED = "undecided"
"""Nothing was proven either way: an error for CI, which must not take it for a pass."""
SKIPPED = "skipped"
"""Left out knowingly, such as a fault that changes no number or a plan that is refused."""

_OUTCOMES = {ALIGNED: PASSED, MISALIGNED: FAILED, INCONCLUSIVE: UNDECIDED}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One judged thing.

    Attributes:
        name: What was judged, such as a mesh.
        outcome: One of the four words above.
        message: One line: why.
        text: All there is to say, the fix included.
        seconds: How long it took.
        columns: What a table of cases shows besides, by heading.
    """

    name: str
    outcome: str
    message: str
    text: str = ""
    seconds: float = 0.0
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CaseList:
    """Many cases with one verdict over all of them.

    Attributes:
        title: What this is, such as ``paralign sweep``.
        verdict: A word, such as ``aligned``.
        outcome: What the verdict stands for: one of the four words above.
        why: One sentence, without its full stop.
        cases: In the order in which they are shown.
        facts: What to show besides, by name: the config, timings.
    """

    title: str
    verdict: str
    outcome: str
    why: str
    cases: tuple[Case, ...]
    facts: Mapping[str, object] = field(default_factory=dict)


def case_of(report: Report) -> Case:
    """Return the one case that a comparison is, named by its mesh."""
    return Case(
        name=mesh_name(report),
        outcome=_OUTCOMES[report.verdict],
        message=report.why,
        text="\n\n".join(explain(finding) for finding in report.findings) or report.why,
        seconds=sum(report.timings.values()),
    )


def mesh_name(report: Report) -> str:
    """Return the axes that split something: ``dp2 cp2, float64``."""
    degrees = [f"{axis}{degree}" for axis, degree in split_axes(report).items()]
    return f"{' '.join(degrees) or 'one rank'}, {report.dtype}"


def explain(finding: Finding) -> str:
    """Return a finding as plain text: what it is, the fix, where, and what is left open."""
    over = f" over {', '.join(finding.axes)}" if finding.axes else ""
    lines = [f"{finding.component}: {finding.cause}{over}"]
    if finding.tensor:
        lines[0] += f" ({finding.tensor})"
    lines.append(finding.fix)
    if place := place_of(finding):
        lines.append(place)
    lines += candidates_of(finding)
    if finding.separate_by:
        lines.append(f"To tell them apart: {finding.separate_by.rstrip('.')}.")
    return "\n".join(lines)


def split_axes(report: Report) -> dict[str, int]:
    """Return the axes that split something, without those that are folded out of others (fsdp)."""
    axes = {axis: degree for axis, degree in report.mesh.items() if degree > 1}
    world_size = report.facts.get("parallel", {}).get("world_size")
    for axis in reversed(list(axes)):
        if not isinstance(world_size, int) or math.prod(axes.values()) <= world_size:
            break
        del axes[axis]  # folded axes follow those that they are made of
    return axes


def candidates_of(finding: Finding) -> list[str]:
    """Return the lines that list what the numbers cannot tell apart; none where they can."""
    if not finding.candidates:
        return []
    return ["It may be any of:", *(f"  - {candidate}" for candidate in finding.candidates)]


def place_of(finding: Finding) -> str:
    """Return the sentence about whose tensor it is; empty where nothing is known."""
    where = finding.where or {}
    if not where.get("class"):
        return ""
    line = f":{where['line']}" if where.get("line") else ""
    # Where torch defines its Linear helps nobody; the module's name is what there is to look for.
    own = where.get("file") and "/site-packages/torch/" not in Path(where["file"]).as_posix()
    place = f" ({where['file']}{line})" if own else ""
    return f"It belongs to {where.get('module') or 'the root'}, a {where['class']}{place}."
