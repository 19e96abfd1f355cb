from __future__ import annotations

from paralign.align.report.case import FAILED, PASSED, SKIPPED, Case, CaseList
from paralign.align.report.html import html_of
from tests.align.report.reports import HOSTILE
from tests.align.report.test_html import Reader, plain

CASES = CaseList(
    title="paralign sweep",
    verdict="misaligned",
    outcome=FAILED,
    why="1 of 3 meshes is off",
    cases=(
        Case(name="pp2", outcome=PASSED, message="fine", seconds=2.0, columns={"worst": "3 eps"}),
        Case(name="pp3", outcome=SKIPPED, message="3 layers do not divide"),
        Case(name="cp2", outcome=FAILED, message="norm is off", text="Fold cp into it."),
    ),
    facts={"config": {"mesh": {"pp": 2}}},
)


def test_what_failed_comes_first_with_its_fix():
    text = plain(html_of(CASES))
    assert "Misaligned 1 of 3 meshes is off." in text
    assert text.index("Fold cp into it.") < text.index("3 layers do not divide")
    assert "worst" in text
    assert "3 eps" in text
    assert "1 failed" in text.replace("failed 1", "1 failed")


def test_names_are_text():
    shapes = []
    for name in ("plain", *HOSTILE):
        case = Case(name=name, outcome=FAILED, message=name, text=name * 2, columns={name: name})
        made = CaseList(
            title=name,
            verdict=name,
            outcome=FAILED,
            why=name,
            cases=(case,),
            facts={name: {name: name}},
        )
        elements = Reader(html_of(made)).elements
        shapes.append([(tag, sorted(attrs)) for tag, attrs in elements if tag != "wbr"])
    assert all(shape == shapes[0] for shape in shapes[1:])
