from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from referencing import Registry, Resource

from paralign.align import trace
from paralign.align.report.case import FAILED, PASSED, SKIPPED, UNDECIDED
from paralign.align.report.html import html_of
from paralign.align.report.junit import junit_of
from paralign.commands.sweep_cases import cases_of_sweep
from paralign.prove.sweep import CellResult, SweepReport

SCHEMAS = Path(trace.__file__).parent / "schema"


def check_schema(name: str, text: str) -> None:
    """Hold a result against a schema, which may refer to that of reports."""
    schemas = [json.loads(path.read_text()) for path in SCHEMAS.glob("*.schema.json")]
    known = [(s["$id"], Resource.from_contents(s)) for s in schemas if "$id" in s]
    schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema, registry=Registry().with_resources(known))
    validator.validate(json.loads(text))


def cell(name: str, verdict: str, **more) -> CellResult:
    return CellResult(mesh={"pp": 2, "cp": 1}, schedule="1F1B", name=name, verdict=verdict, **more)


def sweep(*cells: CellResult) -> SweepReport:
    return SweepReport(
        config={"mesh": {}}, world_size=2, dtype="float64", subset="full", cells=list(cells)
    )


def test_every_cell_is_a_case():
    made = sweep(
        cell("a", "aligned", worst_eps=3.25, seconds=1.5),
        cell("b", "misaligned", why="norm is off", fix="Fold cp into it.", worst_eps=1e15),
        cell("c", "failed", why="rank 1 died"),
        cell("d", "inconclusive", why="no budget"),
        cell("e", "refused", why="3 layers do not divide"),
        cell("f", "not run", why="no time"),
    )
    found = cases_of_sweep(made)
    outcomes = [case.outcome for case in found.cases]
    assert outcomes == [PASSED, FAILED, FAILED, UNDECIDED, SKIPPED, SKIPPED]
    assert found.outcome == FAILED
    assert dict(found.cases[0].columns) == {
        "mesh": "pp2",
        "schedule": "1F1B",
        "worst eps": "3.25",
    }
    assert found.cases[0].seconds == 1.5
    assert "Fold cp into it." in junit_of(found)
    assert "Fold cp into it." in html_of(found)
    check_schema("sweep", made.to_json())


@pytest.mark.parametrize(
    ("verdict", "told", "outcome"),
    [
        ("aligned", "aligned", PASSED),
        ("failed", "failed", FAILED),
        ("inconclusive", "inconclusive", UNDECIDED),
        ("refused", "inconclusive", UNDECIDED),  # nothing ran
    ],
)
def test_one_verdict_stands_for_all(verdict, told, outcome):
    found = cases_of_sweep(sweep(cell("a", verdict)))
    assert (found.verdict, found.outcome) == (told, outcome)


def test_the_schema_refuses_what_is_no_cell():
    made = json.loads(sweep(cell("a", "aligned")).to_json())
    made["sweep"]["cells"][0]["verdict"] = "fine"
    with pytest.raises(jsonschema.ValidationError):
        check_schema("sweep", json.dumps(made))
