from __future__ import annotations

import io
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console

from paralign.align.inspect import InspectReport
from paralign.align.report.inspection import cases_of, render
from paralign.align.report.junit import junit_of
from paralign.align.trace import Kind
from tests.align.inspect.runs import look, on, plain_step


def shown(report: InspectReport, *, verbose: bool = False) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, highlight=False).print(render(report, verbose=verbose))
    return stream.getvalue()


def wrong(tmp_path: Path) -> InspectReport:
    change = on({2, 3}, Kind.GRAD, "norm.weight", lambda g: -g)
    return look(tmp_path, [plain_step()], change=change)


def test_the_finding_comes_first_with_its_fix(tmp_path: Path) -> None:
    lines = shown(wrong(tmp_path)).splitlines()
    assert lines[0].startswith("FINDINGS  4 ranks | dp=2 cp=2 | float64 | ")
    assert lines[1] == "1 findings, first reduction: missing_reduction."
    assert lines[3] == "1. reduction: missing_reduction over dp  norm.weight"
    assert "inputs: no inputs were recorded" in "\n".join(lines)


def test_a_clean_run_says_what_was_looked_at(tmp_path: Path) -> None:
    report = look(tmp_path, [plain_step()])
    assert shown(report).startswith("CLEAN  4 ranks")
    assert "replicas: 16 things, 0 findings" in shown(report, verbose=True)


def test_names_are_not_markup(tmp_path: Path) -> None:
    step = {(kind, f"[red]{name}[/]"): tensor for (kind, name), tensor in plain_step().items()}
    change = on({1}, Kind.GRAD, "[red]norm.weight[/]", lambda g: -g)
    report = look(tmp_path, [step], placements=lambda name: (), change=change)
    assert "[red]norm.weight[/]" in shown(report)


def test_one_case_for_each_check(tmp_path: Path) -> None:
    report = wrong(tmp_path)
    suite = ElementTree.fromstring(junit_of(cases_of(report)))[0]
    cases = {case.get("name"): case for case in suite}
    assert len(cases) == len(report.checks) == int(suite.get("tests") or 0)
    failure = cases["replicas"].find("failure")
    assert failure is not None
    assert "Reduce them over dp" in (failure.text or "")
    assert cases["inputs"].find("skipped") is not None
    assert cases["updates"].find("failure") is None
