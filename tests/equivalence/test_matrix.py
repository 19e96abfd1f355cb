"""The matrix on real ranks: a cover in every run, a larger one and all by ``pytest -m long``.

Every run has each pair of choices, where an axis is used or not, on four ranks if they are enough
and else on eight; the larger cover tells degrees apart and has more micro-batches.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import pytest

from paralign.parallel.stages import SCHEDULES
from tests.equivalence.cases import (
    MODELS,
    MODES,
    RECOMPUTE,
    WRAPS,
    Case,
    combinations,
    cover,
    legal_cases,
    meshes,
)
from tests.equivalence.table import CASES_PER_WORLD, chosen_cases, run

CASES = list(legal_cases())
COVER = list[Case]()
for size in (4, 8):
    SMALL = [c for c in legal_cases(world_size=size) if max(c.degrees) < 8 > c.num_microbatches]
    COVER += cover(SMALL, most_ranks=2, taken=COVER)
MESHES = sorted({case.mesh for case in COVER}, reverse=True)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
PARTS = [name for name in RECOMPUTE if name != "none"]


def failures(cases):
    found = []
    for degrees in dict.fromkeys(case.degrees for case in cases):
        chosen = [case for case in cases if case.degrees == degrees]
        for start in range(0, len(chosen), CASES_PER_WORLD):
            results = run(chosen[start : start + CASES_PER_WORLD])
            found += [f"{result['id']}: {result['why']}" for result in results if result["why"]]
    return found


def test_the_full_product_holds_every_factorisation_of_eight_ranks():
    assert len(meshes()) == 35
    assert {case.mesh for case in CASES} == set(meshes())
    for case in CASES[::97]:
        assert case.config().mesh.degrees.world_size == 8


def test_the_larger_cover_meets_fsdp_pp_and_cp_together_under_every_schedule_and_grouping():
    triples = [case for case in cover(CASES) if min(case.pp, case.dp_shard, case.cp) > 1]
    assert len({(case.schedule, case.wrap) for case in triples}) == 7 * 4


def why_not(first, second):
    """Return why two choices cannot meet, in words; None: they can."""
    chosen = dict([first, second])
    schedule, m = chosen.get("schedule"), chosen.get("num_microbatches")
    if m == 8 or schedule == "DualPipeV":
        # Eight are taken only where four are too few; DualPipeV needs two for each rank of pp.
        chosen.setdefault("pp", 4 if m == 8 else 1)
    cuts = chosen.get("overlap", False) or not chosen.get("sequence_parallel", True)
    least = {"tp": 2 if cuts else 1}
    least["cp"] = {"gather": 2, "balanced": 2, "hybrid": 4}.get(str(chosen.get("mode")), 1)
    degrees = {axis: chosen.get(axis, least.get(axis, 1)) for axis in AXES}
    inner = degrees["pp"] * degrees["dp_replicate"]
    ep, model = chosen.get("ep", 1), chosen.get("model", "mixtral")
    zero_bubble = schedule is not None and SCHEDULES[schedule.lower()].zero_bubble
    reasons = {
        "there are eight ranks": math.prod(degrees.values()) > 8,
        "an axis has the ranks that an option needs": any(
            degrees[axis] < number for axis, number in least.items()
        ),
        "ep is carved out of dp_shard x cp x tp": inner * ep > 8,
        "only experts lie on ep": ep > 1 and "num_experts" not in MODELS[model],
        "what is split is not computed again": zero_bubble and chosen.get("recompute") in PARTS,
        "chunks are of the sequence": chosen.get("overlap")
        and not chosen.get("sequence_parallel", True),
        "eight micro-batches are for these two": m == 8
        and (schedule not in (None, "1F1B", "DualPipeV") or degrees["pp"] < 4),
        "too few micro-batches": (m == 1 and schedule == "DualPipeV")
        or (m in (1, 4) and schedule == "1F1B" and m < degrees["pp"])
        or (schedule == "DualPipeV" and 2 * degrees["pp"] > 8),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


@pytest.mark.parametrize("is_larger", [False, True])
def test_every_pair_of_choices_is_in_the_cover_unless_it_cannot_be(is_larger):
    chosen = cover(CASES) if is_larger else COVER
    most_ranks = None if is_larger else 2
    covered = set().union(*(combinations(case, most_ranks) for case in chosen))
    names = [field.name for field in fields(Case)]
    values = {name: sorted({getattr(case, name) for case in CASES}, key=str) for name in names}
    assert set(values["model"]) == set(MODELS)
    assert set(values["mode"]) == set(MODES)
    assert set(values["wrap"]) == set(WRAPS)
    assert set(values["recompute"]) == set(RECOMPUTE)
    assert values["ep"] == [1, 2, 4, 8]
    if not is_larger:
        values |= {name: [1, 2] for name in (*AXES, "ep")}
        values["num_microbatches"].remove(8)
    missing = []
    for (i, first), (j, second) in itertools.combinations(enumerate(names), 2):
        for one, other in itertools.product(values[first], values[second]):
            if ((i, one), (j, other)) not in covered:
                missing.append(((first, one), (second, other)))
    unexplained = [pair for pair in missing if why_not(*pair) is None]
    assert unexplained == []


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_case_is_the_run_of_one_device(mesh):
    assert failures([case for case in COVER if case.mesh == mesh]) == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", meshes(), ids=lambda mesh: "x".join(map(str, mesh)))
def test_the_larger_cover_is_the_run_of_one_device(mesh):
    assert failures([case for case in cover(CASES) if case.mesh == mesh]) == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", meshes(), ids=lambda mesh: "x".join(map(str, mesh)))
def test_the_full_product_is_the_run_of_one_device(mesh):
    assert failures([case for case in chosen_cases(None) if case.mesh == mesh]) == []
