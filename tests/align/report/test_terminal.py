from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from paralign.align import Report, compare
from paralign.align.report.terminal import print_report
from paralign.align.trace import Kind
from tests.align.report.reports import finding
from tests.align.synthetic import toy_step, write_trace


def shown(report: Report, *, width: int = 100, verbose: bool = False, color: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=color, highlight=False)
    print_report(report, console, verbose=verbose)
    return stream.getvalue()


def report_of(tmp_path: Path, parallel: Any, **options: Any) -> Report:
    write_trace(tmp_path / "ref", [toy_step()])
    write_trace(tmp_path / "par", [parallel], mesh={"dp": 2, "cp": 2}, **options)
    return compare(tmp_path / "ref", tmp_path / "par")


def wrong() -> Any:
    return {key: 2 * value if key[0] == Kind.GRAD else value for key, value in toy_step().items()}


def test_first_line_says_it_all(tmp_path: Path) -> None:
    report = report_of(tmp_path, toy_step())
    report.timings = {"compare_s": 0.25, "parallel_s": 1.25}
    assert shown(report).splitlines()[0] == (
        "ALIGNED  loss 2 (rel 0) | 3/3 parameters | worst 0 eps | float64 | 1.5 s"
    )


def test_no_colour_and_no_markup_outside_of_a_terminal(tmp_path: Path) -> None:
    step = {(kind, f"[red]{name}[/]"): tensor for (kind, name), tensor in toy_step().items()}
    write_trace(tmp_path / "ref", [step])
    write_trace(tmp_path / "par", [step])
    report = compare(tmp_path / "ref", tmp_path / "par")
    text = shown(report)
    assert "\x1b" not in text
    assert "[red]norm.weight[/]" in text
    assert "\x1b" in shown(report, color=True)


def test_worst_tensors_come_first_with_their_worst_element(tmp_path: Path) -> None:
    text = shown(report_of(tmp_path, wrong()))
    lines = text.splitlines()
    assert lines[0].startswith("MISALIGNED")
    first = next(i for i, line in enumerate(lines) if line.startswith("grad"))
    assert "4.5e+15" in lines[first]
    assert lines[first + 1].strip().startswith("at [")
    assert ", rank 0, 1, 2, 3" in lines[first + 1]
    assert max(map(len, lines)) <= 100


def test_findings_come_with_all_that_helps_to_act_on_them(tmp_path: Path) -> None:
    report = report_of(tmp_path, wrong())
    report.findings = [finding(), finding(cause="stale", axes=[], separate_by=None, candidates=[])]
    text = shown(report)
    assert "1. reduction: missing_reduction over cp  norm.weight" in text
    assert "2. reduction: stale  norm.weight" in text
    first, second = text.split("2. reduction")
    lines = [line.strip() for line in first.splitlines()]
    assert "Fold cp into the FSDP mesh." in lines
    assert "It belongs to norm, a RMSNorm (model.py:31)." in lines
    at = lines.index("It may be any of:")
    assert lines[at + 1 : at + 3] == ["- cp=2", "- dp_shard=2"]
    assert "To tell them apart: run again with cp=4." in lines
    assert "Taken out, 4.5e+15 eps become 2." in lines
    assert "It may be any of" not in second
    assert "To tell them apart" not in second


def isolated(**more: Any) -> dict[str, Any]:
    return {
        "kind": "output",
        "name": "layers.1.attention",
        "eps": 4.5e15,
        "budget_eps": 100.0,
        "scale": 2.0,
        "class": "Attention",
        "file": "model.py",
        "line": 12,
        **more,
    }


def test_modules_that_are_wrong_by_themselves_are_named(tmp_path: Path) -> None:
    report = report_of(tmp_path, wrong())
    assert report.located is not None
    assert "wrong by itself" not in shown(report)
    report.located["isolated"] = [isolated(), isolated(name="", file=None, line=None)]
    lines = [line.strip() for line in shown(report).splitlines()]
    at = lines.index("wrong by itself, given what came before:")
    assert lines[at + 1 : at + 3] == [
        "layers.1.attention  output of a Attention (model.py:12), 4.5e+15 eps",
        "the model  output of a Attention, 4.5e+15 eps",
    ]
    report.located["isolated"] = []
    assert "every module is right, given what came before it" in shown(report)


def test_a_row_says_where_in_the_tensor_it_is_off(tmp_path: Path) -> None:
    step = toy_step()
    grad = step[Kind.GRAD, "embed.weight"].clone()
    grad[5] += 1.0
    text = shown(report_of(tmp_path, {**step, (Kind.GRAD, "embed.weight"): grad}))
    assert "row 5 of 7 holds 99% of the error" in " ".join(text.split())


def test_ten_rows_by_default_and_all_on_request(tmp_path: Path) -> None:
    report = report_of(tmp_path, toy_step())
    assert len(report.tensors) == 17
    rows = [
        line
        for line in shown(report).splitlines()
        if line.split(" ")[0] in {row.kind for row in report.tensors}
    ]
    assert len(rows) == 10
    assert "worst first, 10 of 17; -v shows all" in shown(report)
    text = shown(report, verbose=True)
    assert "worst first, all." in text
    assert "world size: 1 in the reference, 4 in parallel" in text


def test_what_was_not_compared_is_said(tmp_path: Path) -> None:
    report = report_of(tmp_path, toy_step(), leave_out=lambda rank, entry: entry.kind == "moment")
    text = shown(report)
    assert text.startswith("INCONCLUSIVE")
    assert "not compared: 1" in text
    assert "moment exp_avg of step 0  not recorded in the parallel run" in text


def test_narrow_terminals_lose_no_name(tmp_path: Path) -> None:
    long = "model.decoder.layers.11.attention.projections.query.weight"
    step = {(kind, long): tensor for (kind, name), tensor in toy_step().items() if "norm" in name}
    write_trace(tmp_path / "ref", [step])
    write_trace(tmp_path / "par", [step])
    text = shown(compare(tmp_path / "ref", tmp_path / "par"), width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert "weight" in text


def test_nan_is_shown_as_such(tmp_path: Path) -> None:
    step = toy_step()
    step[Kind.GRAD, "norm.weight"] = step[Kind.GRAD, "norm.weight"] * float("nan")
    text = shown(report_of(tmp_path, step))
    assert "worst nan eps" in text.splitlines()[0]
