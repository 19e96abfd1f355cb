from __future__ import annotations

from torch.nn.modules import linear

from paralign.align.report.case import (
    FAILED,
    PASSED,
    UNDECIDED,
    case_of,
    explain,
    mesh_name,
    place_of,
)
from tests.align.report.reports import finding, report, row, small_report


def test_a_comparison_is_one_case_named_by_its_mesh():
    case = case_of(small_report())
    assert case.name == "pp2 dp_shard2 cp2, float64"
    assert case.outcome == FAILED
    assert case.message.startswith("first out of budget")
    assert "Fold cp into the FSDP mesh." in case.text
    assert round(case.seconds, 6) == 4.6


def test_verdicts_are_outcomes():
    rows = [row("grad", "w")]
    assert case_of(report(rows)).outcome == PASSED
    undecided = case_of(report(rows, verdict="inconclusive", why="nothing was recorded"))
    assert (undecided.outcome, undecided.text) == (UNDECIDED, "nothing was recorded")


def test_one_rank_has_a_name_too():
    assert mesh_name(report([], mesh={"pp": 1})) == "one rank, float64"


def test_axes_that_are_folded_out_of_others_are_not_named():
    mesh = {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 1, "fsdp": 4}
    made = report([], mesh=mesh, facts={"parallel": {"world_size": 8}})
    assert mesh_name(made) == "pp2 dp_shard2 cp2, float64"


def test_a_finding_as_text_leaves_nothing_out():
    assert explain(finding()).splitlines() == [
        "reduction: missing_reduction over cp (norm.weight)",
        "Fold cp into the FSDP mesh.",
        "It belongs to norm, a RMSNorm (model.py:31).",
        "It may be any of:",
        "  - cp=2",
        "  - dp_shard=2",
        "To tell them apart: run again with cp=4.",
    ]


def test_several_findings_are_told_one_after_another():
    made = report([row("grad", "w", eps=1e9)], findings=[finding(), finding(cause="stale")])
    text = case_of(made).text
    assert text.index("missing_reduction") < text.index("stale")


def test_a_place_may_lack_its_file_or_be_unknown():
    where: dict[str, object] = {"module": "", "class": "Model", "file": None, "line": None}
    assert place_of(finding(where=where)) == "It belongs to the root, a Model."
    assert place_of(finding(where=None)) == ""
    where = {"module": "wq", "class": "Linear", "file": linear.__file__, "line": 53}
    assert place_of(finding(where=where)) == "It belongs to wq, a Linear."  # torch's own file
