from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from paralign.commands.report import deliver


@dataclass
class Verdict:
    """As much of a report as delivering one needs."""

    verdict: str = "misaligned"
    why: str = "layers.0 is out of budget"
    exit_status: int = 1

    def to_json(self) -> str:
        return json.dumps({"verdict": self.verdict})


@pytest.mark.parametrize("status", [0, 1, 4])
def test_the_status_is_the_reports(status, capsys):
    assert deliver(Verdict(exit_status=status), json=None, quiet=True, verbose=False) == status  # type: ignore[arg-type]
    assert capsys.readouterr().out == "misaligned: layers.0 is out of budget.\n"


def test_json_is_written_and_the_rest_printed(tmp_path, monkeypatch, capsys):
    shown: list[bool] = []

    def render(report: Verdict, *, verbose: bool) -> str:
        shown.append(verbose)
        return "the table"

    monkeypatch.setattr("paralign.align.report.terminal.render", render)
    path = tmp_path / "r.json"
    assert deliver(Verdict(), json=path, quiet=False, verbose=True) == 1  # type: ignore[arg-type]
    assert json.loads(path.read_text()) == {"verdict": "misaligned"}
    assert capsys.readouterr().out == "the table\n"
    assert shown == [True]
