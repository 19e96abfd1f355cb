"""Cases as JUnit XML, the format that CI systems read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from paralign.align.report.case import FAILED, SKIPPED, UNDECIDED, Case, CaseList, case_of
from paralign.align.verdict import Report

# XML 1.0 has no way to write these, not even escaped.
_UNWRITABLE = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_TAGS = {FAILED: "failure", UNDECIDED: "error", SKIPPED: "skipped"}


def junit_of(result: Report | CaseList) -> str:
    """Return a report as one case, or every case of a list: the fix is the failure's text."""
    if isinstance(result, CaseList):
        return render_junit(result.title, result.cases)
    return render_junit("paralign", [case_of(result)])


def render_junit(suite: str, cases: Sequence[Case]) -> str:
    """Return one test suite.

    Args:
        suite: Its name; also the class name of every case, by which CI systems group them.
        cases: Failed ones become failures, undecided ones errors.
    """
    outcomes = [case.outcome for case in cases]
    root = ElementTree.Element("testsuites")
    element = ElementTree.SubElement(
        root,
        "testsuite",
        name=_clean(suite),
        tests=str(len(cases)),
        failures=str(outcomes.count(FAILED)),
        errors=str(outcomes.count(UNDECIDED)),
        skipped=str(outcomes.count(SKIPPED)),
        time=f"{sum(case.seconds for case in cases):.3f}",
    )
    for case in cases:
        _add_case(element, suite, case)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{body}\n'


def _add_case(suite: ElementTree.Element, class_name: str, case: Case) -> None:
    element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=_clean(class_name),
        name=_clean(case.name),
        time=f"{case.seconds:.3f}",
    )
    if tag := _TAGS.get(case.outcome):
        why = ElementTree.SubElement(element, tag, message=_clean(case.message))
        if tag != "skipped":
            why.set("type", "misaligned" if case.outcome == FAILED else "inconclusive")
        why.text = _clean(case.text or case.message)


def _clean(text: str) -> str:
    return _UNWRITABLE.sub("\N{REPLACEMENT CHARACTER}", text)
