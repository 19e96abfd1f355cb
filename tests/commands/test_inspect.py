from __future__ import annotations

import json

from paralign.align.trace import Kind
from paralign.cli import main
from tests.align.inspect.runs import look, on, plain_step
from tests.align.synthetic import write_trace


def test_a_clean_trace(tmp_path, capsys):
    look(tmp_path / "par", [plain_step()])
    assert main(["inspect", str(tmp_path / "par"), "-q"]) == 0
    assert capsys.readouterr().out.startswith("clean: nothing contradicts itself in ranks, ")


def test_findings_in_every_form(tmp_path, capsys):
    change = on({2, 3}, Kind.GRAD, "norm.weight", lambda g: -g)
    look(tmp_path / "par", [plain_step()], change=change)
    files = [
        f"--json={tmp_path}/i.json",
        f"--junit={tmp_path}/i.xml",
        f"--report={tmp_path}/i.html",
    ]
    assert main(["inspect", str(tmp_path / "par"), *files]) == 1
    assert "1. reduction: missing_reduction over dp  norm.weight" in capsys.readouterr().out
    assert json.loads((tmp_path / "i.json").read_text())["findings"][0]["axes"] == ["dp"]
    assert "Reduce them over dp" in (tmp_path / "i.xml").read_text()
    assert "missing_reduction" in (tmp_path / "i.html").read_text()


def test_parameters_that_need_no_gradient(tmp_path, capsys):
    look(tmp_path / "par", [{**plain_step(), (Kind.GRAD, "norm.weight"): None}])
    assert main(["inspect", str(tmp_path / "par"), "-q"]) == 1
    assert main(["inspect", str(tmp_path / "par"), "-q", "--unused", "norm.*"]) == 0


def test_what_is_no_trace(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "is not a trace" in capsys.readouterr().err


def test_nothing_to_check(tmp_path, capsys):
    write_trace(tmp_path / "par", [], what=["params"])
    assert main(["inspect", str(tmp_path / "par"), "-q"]) == 4
    assert capsys.readouterr().out.startswith("inconclusive: ")


def test_outputs_are_checked_first(tmp_path, capsys):
    assert main(["inspect", str(tmp_path), f"--json={tmp_path}/no/i.json"]) == 2
    assert "--json" in capsys.readouterr().err
