from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench._step_ranks import Case, Measured, measure
from bench.step import RIDERS_BYTES, report, total_traffic, traffic_problems, value_problems
from paralign.models.llama.presets import tiny
from paralign.testing import run_on_ranks

CASE = Case(
    config=tiny(),
    degrees=(2, 2, 2),
    schedule="1F1B",
    num_microbatches=4,
    global_batch=8,
    seq_len=32,
)
TRAFFIC = {"all-gather": (4, 4096), "all-reduce": (2, 16)}
LIKE_BY_HAND = {"all-gather": (4, 4096), "all-reduce": (2, 16 + RIDERS_BYTES)}


def measured(ratio: float = 1.0, **changes) -> Measured:
    one = Measured(
        values={"hand": [(5.0, 1.0)], "paralign": [(5.0, 1.0)]},
        traffic={"hand": TRAFFIC, "paralign": LIKE_BY_HAND},
        seconds=[{"hand": 2.0, "paralign": 2.0 * ratio, "twin": 2.0}],
        cpu=[{"hand": 1.0, "paralign": ratio, "twin": 1.0}],
    )
    return replace(one, **changes)


@pytest.mark.ranks
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("GPipe", marks=pytest.mark.long)])
def test_a_step_sends_what_the_hand_composed_step_sends(schedule):
    ranks = run_on_ranks(measure, 8, replace(CASE, schedule=schedule), 0)
    assert value_problems(ranks) == []
    for number, rank in enumerate(ranks):
        assert traffic_problems(rank.traffic["hand"], rank.traffic["paralign"], number) == []
    calls = {row.kind: row.paralign[0] / 8 for row in total_traffic(ranks)}
    # Two blocks and a root on each rank, four micro-batches.
    assert calls.pop("all-gather") >= 3  # torch decides how often a freed block is gathered again
    assert calls == {
        "all-reduce": 2,  # loss and norm
        "all-to-all": 2 * 4 * 4,  # before and after attention, forward and backward
        "receive": 4,
        "reduce-scatter": 3,  # one a unit, after the last micro-batch
        "send": 4,
    }


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (LIKE_BY_HAND | {"all-gather": (5, 4096)}, "5 calls of 4096 bytes instead of 4 calls"),
        (LIKE_BY_HAND | {"all-gather": (4, 4100)}, "of 4100 bytes instead of 4 calls of 4096"),
        (LIKE_BY_HAND | {"broadcast": (1, 8)}, "broadcast: 1 calls of 8 bytes instead of 0 calls"),
        (TRAFFIC, "all-reduce: 2 calls of 16 bytes instead of 2 calls of 56 bytes"),
        ({"all-reduce": (2, 56)}, "all-gather: 0 calls of 0 bytes instead of 4 calls"),
    ],
)
def test_other_traffic_is_found(ours, problem):
    (found,) = traffic_problems(TRAFFIC, ours, rank=3)
    assert found.startswith("rank 3: ")
    assert problem in found
    assert traffic_problems(TRAFFIC, LIKE_BY_HAND, rank=3) == []


@pytest.mark.parametrize("wrong", [1.001, math.nan])
def test_sides_that_train_otherwise_are_found(wrong):
    values = {"hand": [(5.0, 1.0)], "paralign": [(5.0, wrong)]}
    assert value_problems([measured(), measured(values=values)]) == [
        f"rank 1, step 0: norm {wrong} instead of 1.0"
    ]
    assert value_problems([measured()]) == []


def test_the_report_judges_ratio_and_traffic(capsys):
    assert report(CASE, [measured(1.05)])
    assert not report(CASE, [measured(1.2)])
    more = {"hand": TRAFFIC, "paralign": LIKE_BY_HAND | {"broadcast": (1, 8)}}
    assert not report(CASE, [measured(traffic=more)])
    printed = capsys.readouterr().out
    assert "1.200    1.000   (target 1.10)" in printed
    assert "the same on every rank, but for 40 bytes a rank" in printed
