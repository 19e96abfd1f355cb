from __future__ import annotations

import pytest
import torch

from paralign.align.inspect.feed import role_of
from paralign.align.trace import ScalarEntry
from tests.align.inspect.runs import batch, feed_trace, only

TOKENS, LABELS = batch()
FACTS = {"global_batch": 4, "seq_len": 16}


def rows(at, size=2, of=TOKENS):
    return of[at * size : (at + 1) * size]


def cut(at, of=TOKENS, size=8):
    return of[:, at * size : (at + 1) * size]


def pair(tokens, labels):
    return {"tokens": tokens, "labels": labels}


def test_right_rows_and_slices_have_no_finding(tmp_path):
    report = feed_trace(
        tmp_path,
        {"dp": 2, "cp": 2, "tp": 2},
        lambda at: [pair(cut(at["cp"], rows(at["dp"])), cut(at["cp"], rows(at["dp"], of=LABELS)))],
        facts=FACTS,
    )
    assert (report.verdict, report.findings) == ("clean", [])
    looked = {check.name: check.looked_at for check in report.checks}
    assert looked["inputs"] == looked["labels"] == 8


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_ranks_of_one_group_with_different_samples(tmp_path, axis):
    report = feed_trace(tmp_path, {axis: 2}, lambda at: [{"tokens": rows(at[axis])}])
    finding = only(report)
    assert (finding.component, finding.cause, finding.axes) == ("data", "different_data", [axis])


def test_a_sampler_by_global_rank_is_seen_over_tp(tmp_path):
    report = feed_trace(
        tmp_path,
        {"dp": 2, "tp": 2},
        lambda at: [{"tokens": rows(2 * at["dp"] + at["tp"], size=1)}],
        facts=FACTS,
    )
    assert only(report).axes == ["tp"]


@pytest.mark.parametrize("axis", ["dp", "dp_shard", "fsdp"])
def test_ranks_of_dp_with_equal_samples(tmp_path, axis):
    finding = only(feed_trace(tmp_path, {axis: 2, "cp": 1}, lambda at: [{"tokens": TOKENS}]))
    assert (finding.cause, finding.axes) == ("different_data", [axis])
    assert "exactly the same samples" in finding.fix


def test_whole_sequences_where_slices_are_due(tmp_path):
    finding = only(feed_trace(tmp_path, {"cp": 2}, lambda at: [{"tokens": TOKENS}], facts=FACTS))
    assert (finding.cause, finding.axes) == ("full_sequence", ["cp"])


def test_a_model_that_cuts_the_sequence_itself_counts_its_own_tokens_only(tmp_path):
    def losses(tokens):
        return lambda at: [ScalarEntry("loss", 0, 1.0, tokens, "sum", "local")]

    given = [pair(TOKENS, LABELS)]
    half = feed_trace(tmp_path, {"cp": 2}, lambda at: given, facts=FACTS, losses=losses(30))
    assert half.verdict == "clean"
    both = feed_trace(tmp_path, {"cp": 2}, lambda at: given, facts=FACTS, losses=losses(60))
    assert both.findings[0].cause == "full_sequence"
    assert "120 valid tokens" in both.findings[1].fix  # counted twice, therefore


def test_tokens_missing_from_the_sequence(tmp_path):
    report = feed_trace(
        tmp_path, {"cp": 2}, lambda at: [{"tokens": cut(at["cp"], size=7)}], facts=FACTS
    )
    finding = only(report)
    assert finding.axes == ["cp"]
    assert "14 positions of each row together, but seq_len=16: 2 are missing" in finding.fix


def test_positions_that_start_again_in_every_slice(tmp_path):
    positions = torch.arange(8).expand(4, -1)
    report = feed_trace(
        tmp_path, {"cp": 2}, lambda at: [{"tokens": cut(at["cp"]), "positions": positions}]
    )
    finding = only(report)
    assert (finding.cause, finding.axes) == ("mask_or_positions", ["cp"])


def test_positions_that_overlap(tmp_path):
    report = feed_trace(
        tmp_path,
        {"cp": 2},
        lambda at: [
            {"tokens": cut(at["cp"]), "positions": (torch.arange(8) + 7 * at["cp"]).expand(4, -1)}
        ],
    )
    assert only(report).cause == "mask_or_positions"


def test_positions_of_packed_documents_may_start_again(tmp_path):
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, -1)
    report = feed_trace(
        tmp_path, {"cp": 2}, lambda at: [{"tokens": cut(at["cp"]), "positions": positions}]
    )
    assert report.verdict == "clean"


def test_zig_zag_positions_are_complete(tmp_path):
    places = {0: [0, 1, 2, 3, 12, 13, 14, 15], 1: list(range(4, 12))}
    report = feed_trace(
        tmp_path,
        {"cp": 2},
        lambda at: [
            {
                "tokens": TOKENS[:, places[at["cp"]]],
                "positions": torch.tensor(places[at["cp"]]).expand(4, -1),
            }
        ],
    )
    assert report.verdict == "clean"


def test_slices_of_samples_that_the_run_itself_calls_different(tmp_path):
    report = feed_trace(
        tmp_path,
        {"cp": 2},
        lambda at: [{"tokens": cut(at["cp"])}],
        samples=lambda at: [(0, 1, 2, 3 + at["cp"])],
    )
    assert only(report).axes == ["cp"]


def test_a_sample_that_comes_twice(tmp_path):
    report = feed_trace(
        tmp_path,
        {"dp": 2},
        lambda at: [{"tokens": rows(at["dp"])}],
        samples=lambda at: [(0, 1 + at["dp"])],
    )
    assert "[0] more than once" in only(report).fix


def test_rows_missing_from_the_global_batch(tmp_path):
    report = feed_trace(
        tmp_path, {"dp": 2}, lambda at: [{"tokens": rows(at["dp"], size=1)}], facts=FACTS
    )
    finding = only(report)
    assert "2 rows together, but global_batch=4: 2 are missing" in finding.fix


def test_the_same_micro_batch_again_and_again(tmp_path):
    report = feed_trace(
        tmp_path,
        {"dp": 2},
        lambda at: [{"tokens": rows(at["dp"], size=1)}] * 2,
        facts=FACTS,
    )
    assert "only 2 different ones" in only(report).fix


def test_short_or_constant_rows_say_nothing(tmp_path):
    report = feed_trace(
        tmp_path, {"dp": 2}, lambda at: [{"tokens": torch.zeros(2, 16, dtype=torch.int64)}]
    )
    assert report.verdict == "clean"


def test_an_axis_of_unknown_name_is_a_note(tmp_path):
    report = feed_trace(tmp_path, {"shelf": 2}, lambda at: [{"tokens": rows(at["shelf"])}])
    assert report.verdict == "clean"
    assert "shelf" in report.notes[0]


@pytest.mark.parametrize(
    ("axis", "role"),
    [("dp_replicate", "dp"), ("efsdp", "dp"), ("sp", "cp"), ("model", "tp"), ("pipe", "pp")],
)
def test_roles_by_name(axis, role):
    assert role_of(axis) == role
