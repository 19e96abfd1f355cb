from __future__ import annotations

import json

import jsonschema
import pytest

from paralign.align.report.case import FAILED, PASSED, SKIPPED
from paralign.align.report.html import html_of
from paralign.align.report.junit import junit_of
from paralign.commands.drill_cases import cases_of_drill
from paralign.errors import RankError
from paralign.prove.drill_report import DrillReport, FaultOutcome
from paralign.prove.fault import Fault
from tests.align.report.reports import finding, report, row
from tests.commands.test_sweep_cases import check_schema

ALIGNED = report([row("grad", "w")])
OFF = report([row("grad", "w", eps=1e9)], findings=[finding(tensor="w", candidates=[])])


def fault(name: str, cause: str = "missing_reduction") -> Fault:
    def breaks(run: object) -> None:
        raise AssertionError("nothing is run here")

    breaks.__doc__ = f"{name} is broken."
    return Fault(
        name=name,
        breaks=breaks,
        needs=frozenset({"cp"}),
        component="reduction",
        axes=frozenset({"cp"}),
        cause=cause,
    )


def drill(clean=ALIGNED) -> DrillReport:
    return DrillReport(
        config={"mesh": {}},
        mesh={"cp": 2},
        dtype="float64",
        clean=clean,
        outcomes=[
            FaultOutcome(fault=fault("named"), report=OFF),
            FaultOutcome(fault=fault("misnamed", "stale"), report=OFF),
            FaultOutcome(fault=fault("missed"), report=ALIGNED),
            FaultOutcome(fault=fault("inert"), report=ALIGNED, inert=True),
            FaultOutcome(fault=fault("fatal"), error=RankError("rank 1 died")),
        ],
        skipped=[("elsewhere", ["tp"])],
        seconds=3.0,
    )


def test_every_fault_is_a_case():
    made = drill()
    found = {case.name: case for case in cases_of_drill(made).cases}
    assert {name: case.outcome for name, case in found.items()} == {
        "no fault": PASSED,
        "named": PASSED,
        "misnamed": PASSED,
        "missed": FAILED,
        "inert": SKIPPED,
        "fatal": PASSED,
        "elsewhere": SKIPPED,
    }
    assert found["misnamed"].message.startswith("misnamed: it is reduction cp stale; found ")
    assert "Fold cp into the FSDP mesh." in found["named"].text
    assert "this config lacks tp" in found["elsewhere"].message
    assert 'failures="1"' in junit_of(cases_of_drill(made))
    assert "missed is broken." in html_of(cases_of_drill(made))
    check_schema("drill", made.to_json())


def test_a_clean_run_that_is_off_fails():
    found = cases_of_drill(drill(clean=OFF))
    assert found.outcome == FAILED
    assert found.cases[0].outcome == FAILED


def test_the_schema_refuses_a_cause_that_does_not_exist():
    made = json.loads(drill().to_json())
    made["drill"]["faults"][0]["expected"]["cause"] = "gremlins"
    with pytest.raises(jsonschema.ValidationError):
        check_schema("drill", json.dumps(made))
