from __future__ import annotations

import math

import pytest

from paralign.align.inspect import inspect
from paralign.align.trace import Facts, RankIndex, ScalarEntry
from paralign.align.trace_writer import TraceWriter, prepare_folder
from tests.align.inspect.runs import only

PARTS = {0: (3.0, 2), 1: (5.0, 6)}  # sum over tokens, tokens: 8 / 8 together, means 1.5 and 0.8333


def losses_of(tmp_path, entries, *, axes=("dp",), facts=None):
    """Write a trace of two ranks that holds nothing but what they report."""
    prepare_folder(tmp_path, rank=0, clear_all=True)
    for rank in (0, 1):
        index = RankIndex(rank, 2, "id", steps=[0])
        index.coordinates = dict.fromkeys(axes, rank)
        index.axes = {axis: [0, 1] for axis in axes}
        index.scalars = list(entries(rank))
        known = Facts("id", 2, [0], ["loss"], {}, {"compute_dtype": "float64", **(facts or {})})
        TraceWriter(tmp_path, index).finish(known if rank == 0 else None)
    return inspect(tmp_path)


def part(rank, reduction="sum"):
    total, tokens = PARTS[rank]
    value = total if reduction == "sum" else total / tokens
    return ScalarEntry("loss", 0, value, tokens, reduction, "local")


def whole(value, tokens=8):
    return ScalarEntry("loss", 0, value, tokens, "mean", "global")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_loss_of_the_step_is_what_its_parts_give(tmp_path, reduction):
    report = losses_of(tmp_path, lambda rank: [part(rank, reduction), whole(1.0)])
    assert report.verdict == "clean"


def test_a_mean_of_means_is_recognised(tmp_path):
    wrong = (1.5 + 5 / 6) / 2
    finding = only(losses_of(tmp_path, lambda rank: [part(rank), whole(wrong)]))
    assert (finding.component, finding.cause, finding.axes) == ("loss", "token_weighting", ["dp"])


def test_one_ranks_own_loss_is_recognised(tmp_path):
    finding = only(losses_of(tmp_path, lambda rank: [part(rank), whole(1.5)]))
    assert (finding.cause, finding.axes) == ("missing_reduction", ["dp"])


def test_a_factor_is_recognised(tmp_path):
    def entries(rank):
        return [ScalarEntry("loss", 0, 6.0, 6, "sum", "local"), whole(0.5, 12)]

    finding = only(losses_of(tmp_path, entries))
    assert (finding.cause, finding.axes) == ("constant_factor", ["dp"])
    assert "averaged over ranks that have no part" in finding.fix


def test_anything_else_is_a_reported_value(tmp_path):
    finding = only(losses_of(tmp_path, lambda rank: [part(rank), whole(0.777)]))
    assert finding.cause == "reported_value"


def test_ranks_that_call_different_numbers_the_loss_of_the_step(tmp_path):
    finding = only(losses_of(tmp_path, lambda rank: [whole(1.0 + rank)]))
    assert (finding.component, finding.cause, finding.axes) == ("loss", "reported_value", ["dp"])
    finding = only(losses_of(tmp_path, lambda rank: [whole(1.0, 8 + rank)]))
    assert (finding.component, finding.tensor) == ("data", "tokens")


def test_tp_ranks_compute_the_same_loss(tmp_path):
    def entries(rank):
        return [ScalarEntry("loss", 0, 1.0 + rank, 4, "sum", "local", ("tp",))]

    finding = only(losses_of(tmp_path, entries, axes=("tp",)))
    assert (finding.cause, finding.axes) == ("missing_reduction", ["tp"])
    assert losses_of(tmp_path, lambda rank: [entries(0)[0]], axes=("tp",)).verdict == "clean"


def test_more_tokens_than_the_batch_has(tmp_path):
    facts = {"global_batch": 2, "seq_len": 4}
    finding = only(losses_of(tmp_path, lambda rank: [whole(1.0, 16)], facts=facts))
    assert (finding.component, finding.cause, finding.axes) == ("data", "constant_factor", ["dp"])
    assert losses_of(tmp_path, lambda rank: [whole(1.0, 8)], facts=facts).verdict == "clean"


def test_a_mean_over_no_tokens_is_told(tmp_path):
    def entries(rank):
        value = math.nan if rank else 1.0
        return [ScalarEntry("loss", 0, value, 4 * (1 - rank), "mean", "local")]

    finding = only(losses_of(tmp_path, entries))
    assert (finding.cause, finding.evidence["ranks_without_tokens"]) == ("token_weighting", [1])
    assert "a mean over none is 0/0" in finding.fix


def test_nothing_reported_is_inconclusive(tmp_path):
    report = losses_of(tmp_path, lambda rank: [])
    assert (report.verdict, report.exit_status) == ("inconclusive", 4)
