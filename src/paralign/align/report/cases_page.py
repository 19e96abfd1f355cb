"""The page of a command that judges many runs: one line per mesh or fault."""

from __future__ import annotations

import json
from collections import Counter

from paralign.align.report.case import FAILED, PASSED, SKIPPED, UNDECIDED, CaseList
from paralign.align.report.page import render_page

# What is wrong comes first.
_ORDER = {FAILED: 0, UNDECIDED: 1, SKIPPED: 2, PASSED: 3}


def render_cases(cases: CaseList) -> str:
    """Return the page of many cases: self-contained, without requests to anywhere."""
    counts = Counter(case.outcome for case in cases.cases)
    headings = dict.fromkeys(name for case in cases.cases for name in case.columns)
    return render_page(
        "cases.html.j2",
        scripts=("cases.js",),
        title=f"{cases.title}: {cases.verdict}",
        list=cases,
        counts=[(outcome, counts[outcome]) for outcome in _ORDER if counts[outcome]],
        headings=list(headings),
        total_seconds=sum(case.seconds for case in cases.cases),
        ordered=sorted(cases.cases, key=lambda case: _ORDER[case.outcome]),
        facts={
            name: value if isinstance(value, str) else json.dumps(value, indent=2, default=str)
            for name, value in cases.facts.items()
        },
        data=None,
    )
