from __future__ import annotations

import json

import pytest

from paralign.align.verdict import Finding, Report
from paralign.errors import RankError
from paralign.prove.drill_report import DrillReport, FaultOutcome
from paralign.prove.fault import fault


@fault(needs={"cp"}, component="reduction", axes={"cp"}, cause="missing_reduction")
def broken(run):
    """Broken."""


def judged(verdict="misaligned", *findings) -> Report:
    return Report(
        verdict=verdict,
        why="for a test",
        dtype="float64",
        yardstick="fp64",
        findings=list(findings),
    )


def finding(component="reduction", axes=("cp",), cause="missing_reduction", **more) -> Finding:
    return Finding(component=component, cause=cause, fix="", axes=list(axes), **more)


LISTED = {
    "candidates": [
        "reduction/constant_factor over dp_shard",
        "reduction/missing_reduction over cp: because",
    ],
    "separate_by": "run again",
}


@pytest.mark.parametrize(
    ("outcome", "word"),
    [
        (FaultOutcome(fault=broken, report=judged("misaligned", finding())), "right"),
        (FaultOutcome(fault=broken, report=judged("inconclusive", finding())), "right"),
        (
            FaultOutcome(fault=broken, report=judged("misaligned", finding(cause="unknown"))),
            "misnamed",
        ),
        (FaultOutcome(fault=broken, report=judged("misaligned", finding(axes=()))), "mislocated"),
        (
            FaultOutcome(fault=broken, report=judged("misaligned", finding(axes=("cp", "pp")))),
            "mislocated",
        ),
        (
            FaultOutcome(fault=broken, report=judged("misaligned", finding("loss"), finding())),
            "mislocated",  # only what is named first counts
        ),
        (FaultOutcome(fault=broken, report=judged()), "mislocated"),
        (FaultOutcome(fault=broken, report=judged("aligned")), "missed"),
        (FaultOutcome(fault=broken, report=judged("aligned"), inert=True), "inert"),
        (FaultOutcome(fault=broken, error=RankError("rank 0: fell over")), "mislocated"),
        (
            FaultOutcome(
                fault=broken,
                report=judged("misaligned", finding(axes=(), cause="constant_factor", **LISTED)),
            ),
            "right",
        ),
        (
            FaultOutcome(
                fault=broken,
                report=judged(
                    "misaligned",
                    finding(axes=(), cause="constant_factor", candidates=LISTED["candidates"]),
                ),
            ),
            "mislocated",  # a candidate without the run that decides does not count
        ),
    ],
)
def test_an_outcome_in_one_word(outcome, word):
    assert outcome.word == word


def report(*outcomes, clean="aligned") -> DrillReport:
    return DrillReport(
        config=None,
        mesh={"cp": 2},
        dtype="float64",
        clean=judged(clean),
        outcomes=list(outcomes),
        skipped=[("other", ["pp"])],
    )


RIGHT = FaultOutcome(fault=broken, report=judged("misaligned", finding()))
MISSED = FaultOutcome(fault=broken, report=judged("aligned"))
INERT = FaultOutcome(fault=broken, report=judged("aligned"), inert=True)
FELL = FaultOutcome(fault=broken, error=RankError("rank 0: fell over"))


def test_a_drill_counts_only_faults_that_change_a_number():
    numbers = report(RIGHT, MISSED, INERT).summary
    assert numbers == {
        "faults": 3,
        "inert": 1,
        "active": 2,
        "caught": 1,
        "component_and_axes": 1,
        "cause": 1,
        "right": 1,
    }


@pytest.mark.parametrize(
    ("drill", "status"),
    [
        (report(RIGHT, INERT), 0),
        (report(RIGHT, FELL), 0),
        (report(RIGHT, MISSED), 1),
        (report(RIGHT, clean="misaligned"), 1),
    ],
)
def test_the_exit_status_is_0_when_all_is_caught_and_the_clean_run_aligned(drill, status):
    assert drill.exit_status == status


def test_the_json_says_what_was_expected_and_found():
    drill = json.loads(report(RIGHT, FELL).to_json())["drill"]
    right, fell = drill["faults"]
    assert right["expected"] == {
        "component": "reduction",
        "axes": ["cp"],
        "cause": "missing_reduction",
    }
    assert right["correct"] == {"component": True, "axes": True, "cause": True}
    assert right["findings"][0]["cause"] == "missing_reduction"
    assert (fell["caught"], fell["error"], fell["findings"]) == (True, "rank 0: fell over", [])
    assert drill["skipped"] == [{"name": "other", "lacks": ["pp"]}]
    assert drill["clean"]["verdict"] == "aligned"
