from __future__ import annotations

from paralign.align.verdict import Finding, Report
from paralign.commands.drill_page import render_page
from paralign.errors import RankError
from paralign.prove.drill_report import DrillReport, FaultOutcome
from paralign.prove.fault import fault


@fault(component="loss", cause="reported_value")
def shown_wrong(run):
    """Shown | wrong."""


def report(verdict, *findings):
    return Report(verdict=verdict, why="", dtype="float64", yardstick="", findings=list(findings))


def test_the_page_counts_over_all_configs_and_shows_what_was_not_right():
    right = Finding(component="loss", cause="reported_value", fix="")
    outcomes = [
        FaultOutcome(fault=shown_wrong, report=report("misaligned", right)),
        FaultOutcome(fault=shown_wrong, error=RankError("rank 1: fell\nover")),
        FaultOutcome(fault=shown_wrong, report=report("aligned"), inert=True),
    ]
    drills = {
        name: DrillReport(
            config=None,
            mesh={"cp": 2, "pp": 1},
            dtype="float64",
            clean=report("aligned"),
            outcomes=outcomes,
        )
        for name in ("a.yaml", "b.yaml")
    }
    page = render_page(drills)
    assert "| caught | 4 of 4 | 100.0 % |" in page
    assert "| cause right as well | 2 of 4 | 50.0 % |" in page
    assert "## b.yaml\n\ncp=2, float64. 2 of 2 faults caught" in page
    row = "| `shown_wrong` | Shown \\| wrong. | loss reported_value |"
    assert f"{row} right |  |" in page
    assert f"{row} mislocated | ended the run: rank 1: fell |" in page
    assert f"{row} inert |  |" in page
