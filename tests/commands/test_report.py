from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from paralign.cli import main
from paralign.commands.report import check_outputs, deliver, write_outputs
from paralign.errors import ConfigError
from tests.align.report.reports import HOSTILE, finding, report, row, small_report
from tests.align.synthetic import toy_step, write_trace


@pytest.mark.parametrize(
    ("verdict", "status"), [("aligned", 0), ("misaligned", 1), ("inconclusive", 4)]
)
def test_the_status_is_the_reports(verdict, status, capsys):
    made = report([], verdict=verdict, why="that is how it is")
    assert deliver(made, json=None, quiet=True, verbose=False) == status
    assert capsys.readouterr().out == f"{verdict}: that is how it is.\n"


def test_files_are_written_and_the_rest_printed(tmp_path, capsys):
    places = {name: tmp_path / f"r.{name}" for name in ("json", "junit", "html")}
    assert deliver(small_report(), quiet=False, verbose=False, **places) == 1
    assert json.loads(places["json"].read_text())["verdict"] == "misaligned"
    assert ElementTree.parse(places["junit"]).find("testsuite/testcase/failure") is not None
    assert places["html"].read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out.startswith("MISALIGNED")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.html", "r.json", "r.junit"]


def test_what_is_not_asked_for_is_not_made(tmp_path):
    def never() -> str:
        raise AssertionError("nobody asked for it")

    write_outputs(small_report(), never, json=None, junit=None, html=None)
    assert list(tmp_path.iterdir()) == []


def test_half_a_character_in_a_name_can_be_written(tmp_path):
    name = "half\ud800"
    made = report([row("grad", name, eps=1e9)], findings=[finding(tensor=name)])
    write_outputs(
        made,
        made.to_json,
        json=tmp_path / "r.json",
        junit=tmp_path / "r.xml",
        html=tmp_path / "r.html",
    )
    assert json.loads((tmp_path / "r.json").read_text())["tensors"][0]["name"] == name


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"--junit=.*there is no folder"):
        check_outputs(junit=tmp_path / "nowhere" / "r.xml")
    with pytest.raises(ConfigError, match=r"--report=.* is a folder"):
        check_outputs(html=tmp_path)
    check_outputs(json=tmp_path / "a", junit=tmp_path / "b", html=tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_two_results_in_one_file_are_refused(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=r"--json=.* and --report=.* are the same file"):
        check_outputs(json=tmp_path / "r", html=tmp_path / "x" / ".." / "r")


def compare(tmp_path: Path) -> list[str]:
    step = {
        (kind, HOSTILE[0]): value for (kind, name), value in toy_step().items() if "norm" in name
    }
    wrong = {key: 3 * value if key[0] == "grad" else value for key, value in step.items()}
    write_trace(tmp_path / "ref", [step])
    write_trace(tmp_path / "par", [wrong], mesh={"dp": 2})
    return ["compare", str(tmp_path / "ref"), str(tmp_path / "par")]


def inspect(tmp_path: Path) -> list[str]:
    return ["inspect", compare(tmp_path)[2]]


@pytest.mark.parametrize("command", [compare, inspect])
def test_every_command_that_judges_traces_writes_all_three(
    command: Callable[[Path], list[str]], tmp_path: Path
):
    arguments = command(tmp_path)
    options = {"--json": "r.json", "--junit": "r.xml", "--report": "r.html"}
    for option, name in options.items():
        arguments += [option, str(tmp_path / name)]
    status = main([*arguments, "-q"])
    assert status in (0, 1, 4)
    verdict = json.loads((tmp_path / "r.json").read_text())["verdict"]
    assert f"<title>{verdict}:" in (text := (tmp_path / "r.html").read_text()) or verdict in text
    assert "<img" not in text
    suite = ElementTree.parse(tmp_path / "r.xml").find("testsuite")
    assert suite is not None
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    assert (failed > 0) == (status != 0)
