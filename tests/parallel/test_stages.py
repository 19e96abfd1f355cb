from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import get_schedule_class

from paralign.errors import ScheduleError
from paralign.parallel.stages import (
    SCHEDULES,
    Placement,
    default_stages_per_rank,
    find_schedule,
    rank_of_stage,
    split_layers,
    stages_of_rank,
)

LOOP = SCHEDULES["loopedbfs"]
V = SCHEDULES["zbvzerobubble"]


def test_every_name_is_torchs_own():
    for kind in SCHEDULES.values():
        assert get_schedule_class(kind.name).__name__ == f"Schedule{kind.name}"


def test_which_schedules_split_the_backward_pass():
    split = [kind.name for kind in SCHEDULES.values() if kind.zero_bubble]
    assert split == ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def test_stages_a_rank_runs_by_default():
    defaults = {kind.name: default_stages_per_rank(kind) for kind in SCHEDULES.values()}
    assert defaults == {
        "GPipe": 1,
        "1F1B": 1,
        "Interleaved1F1B": 2,
        "LoopedBFS": 2,
        "InterleavedZeroBubble": 2,
        "ZBVZeroBubble": 2,
        "DualPipeV": 2,
    }


def test_a_schedule_is_found_in_any_case():
    assert find_schedule("gpipe").name == "GPipe"
    assert find_schedule("ZBVZEROBUBBLE").placement is Placement.V


def test_an_unknown_schedule_suggests_the_nearest():
    known = (
        "GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"
    )
    with pytest.raises(ScheduleError) as caught:
        find_schedule("DualPipe")
    assert str(caught.value) == (
        f"schedule='DualPipe' is not a schedule. Did you mean DualPipeV? Use one of {known}."
    )
    with pytest.raises(ScheduleError) as caught:
        find_schedule("xyz")
    assert str(caught.value) == f"schedule='xyz' is not a schedule. Use one of {known}."


def test_the_picture_in_the_module_docstring_is_right():
    assert [stages_of_rank(LOOP, 4, r, 2) for r in range(4)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [stages_of_rank(V, 4, r, 2) for r in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=lambda kind: kind.name)
def test_placement_is_torchs_own(kind, pp):
    per_rank = default_stages_per_rank(kind)
    style = "v" if kind.placement is Placement.V else "loop"
    theirs = generate_stage_to_rank_mapping(pp, pp * per_rank, style)
    assert {stage: rank_of_stage(kind, pp, stage) for stage in theirs} == theirs
    for rank in range(pp):
        mine = [stage for stage, owner in theirs.items() if owner == rank]
        assert stages_of_rank(kind, pp, rank, per_rank) == mine


@pytest.mark.parametrize("per_rank", [1, 3, 4])
def test_looped_schedules_take_any_number_of_stages_a_rank(per_rank):
    theirs = generate_stage_to_rank_mapping(2, 2 * per_rank, "loop")
    assert {stage: rank_of_stage(LOOP, 2, stage) for stage in theirs} == theirs
    assert stages_of_rank(LOOP, 2, 1, per_rank) == [s for s, owner in theirs.items() if owner == 1]


def test_layers_that_do_not_divide_go_to_the_first_stages():
    assert split_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert split_layers(4, 4) == [range(1), range(1, 2), range(2, 3), range(3, 4)]


def test_layers_are_split_as_listed():
    assert split_layers(7, 3, (1, 5, 1)) == [range(1), range(1, 6), range(6, 7)]


@given(st.integers(1, 40), st.integers(1, 8))
def test_every_layer_is_on_one_stage_and_stages_differ_by_one_at_most(num_layers, num_stages):
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
