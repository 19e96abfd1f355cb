from __future__ import annotations

from xml.etree import ElementTree

import pytest

from paralign.align.report.case import FAILED, PASSED, SKIPPED, UNDECIDED, Case, CaseList
from paralign.align.report.junit import junit_of, render_junit
from tests.align.report.reports import HOSTILE, report, row, small_report

CASES = (
    Case(name="pp2", outcome=PASSED, message="fine", seconds=1.5),
    Case(name="cp2", outcome=FAILED, message="norm is off", text="Fold cp into it.", seconds=0.25),
    Case(name="dp2", outcome=UNDECIDED, message="no budget"),
    Case(name="pp3", outcome=SKIPPED, message="3 layers do not divide"),
)


def suite(text: str) -> ElementTree.Element:
    found = ElementTree.fromstring(text).find("testsuite")
    assert found is not None
    return found


def test_outcomes_are_counted_and_told():
    found = suite(render_junit("paralign sweep", CASES))
    assert found.attrib == {
        "name": "paralign sweep",
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
        "time": "1.750",
    }
    cases = {case.attrib["name"]: case for case in found}
    assert list(cases["pp2"]) == []
    [failure] = cases["cp2"]
    assert (failure.tag, failure.text) == ("failure", "Fold cp into it.")
    assert failure.attrib == {"message": "norm is off", "type": "misaligned"}
    [error] = cases["dp2"]
    assert (error.tag, error.attrib["type"]) == ("error", "inconclusive")
    [skipped] = cases["pp3"]
    assert (skipped.tag, skipped.attrib["message"]) == ("skipped", "3 layers do not divide")


def test_a_report_is_one_case_with_the_fix_as_its_failure():
    [case] = suite(junit_of(small_report()))
    assert case.attrib["name"] == "pp2 dp_shard2 cp2, float64"
    failure = case.find("failure")
    assert failure is not None
    assert "Fold cp into the FSDP mesh." in (failure.text or "")


def test_an_inconclusive_report_is_no_pass():
    made = report([row("grad", "w")], verdict="inconclusive", why="the weights differ")
    [case] = suite(junit_of(made))
    assert [(part.tag, part.attrib["message"]) for part in case] == [
        ("error", "the weights differ")
    ]


def test_a_list_of_cases_is_a_suite():
    cases = CaseList(title="paralign sweep", verdict="x", outcome=FAILED, why="y", cases=CASES)
    assert suite(junit_of(cases)).attrib["tests"] == "4"


@pytest.mark.parametrize("name", [*HOSTILE, "null\0byte", "bell\a", "]]>", "\ud800"])
def test_any_name_can_be_written_and_read_back(name):
    text = render_junit(name, [Case(name=name, outcome=FAILED, message=name, text=name)])
    [case] = suite(text)
    readable = name.replace("\0", "\ufffd").replace("\a", "\ufffd").replace("\ud800", "\ufffd")
    assert case.attrib["name"] == readable
    assert case[0].text == readable
    text.encode()
