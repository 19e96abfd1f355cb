"""The matrix on real ranks: part of a cover in every run, the product by ``pytest -m long``."""

from __future__ import annotations

import pytest

from tests.equivalence.cases import cover, legal_cases, meshes, tensor_cases
from tests.equivalence.table import CASES_PER_WORLD, run

COVER = cover(list(legal_cases()))
MESHES = sorted({case.mesh for case in COVER}, reverse=True)


def every_run(mesh):
    """Return the cases of the cover that every run has: all with three axes, half of the others."""
    cases = [case for case in COVER if case.mesh == mesh]
    return cases if sum(degree > 1 for degree in mesh) > 2 else cases[::2]


def failures(cases):
    return [f"{result['id']}: {result['why']}" for result in run(cases) if result["why"]]


def test_the_full_product_holds_every_factorisation_of_eight_ranks():
    assert len(meshes()) == 20
    assert {case.mesh for case in legal_cases()} == set(meshes())


def test_the_cover_meets_fsdp_pp_and_cp_together_under_every_schedule_and_grouping():
    triples = [case for case in COVER if min(case.pp, case.dp_shard, case.cp) > 1]
    assert len({(case.schedule, case.wrap) for case in triples}) == 7 * 4


@pytest.mark.ranks
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_case_is_the_run_of_one_device(mesh):
    assert failures(every_run(mesh)) == []


def test_every_run_has_every_mesh_schedule_grouping_and_mode():
    cases = [case for mesh in MESHES for case in every_run(mesh)]
    for name in ("mesh", "schedule", "wrap", "mode", "model", "num_microbatches", "tied"):
        chosen = {getattr(case, name) for case in cases}
        assert chosen == {getattr(case, name) for case in COVER}, name


TENSOR_COVER = cover(list(tensor_cases()))
TENSOR_MESHES = sorted({case.mesh for case in TENSOR_COVER}, reverse=True)


def test_the_cover_meets_tp_with_every_other_axis_and_choice():
    assert {case.mesh for case in tensor_cases()} == set(TENSOR_MESHES)
    assert len(TENSOR_MESHES) == 15
    assert {case.schedule for case in TENSOR_COVER if case.tp == 4} == {
        case.schedule for case in COVER
    }
    assert len({(case.sequence_parallel, case.mode) for case in TENSOR_COVER}) == 2 * 4


@pytest.mark.long
@pytest.mark.parametrize("mesh", TENSOR_MESHES, ids=lambda mesh: "x".join(map(str, mesh)))
def test_every_case_with_tp_is_the_run_of_one_device(mesh):
    assert failures([case for case in TENSOR_COVER if case.mesh == mesh]) == []


@pytest.mark.long
@pytest.mark.parametrize("mesh", meshes(), ids=lambda mesh: "x".join(map(str, mesh)))
def test_the_full_product_is_the_run_of_one_device(mesh):
    cases = [case for case in legal_cases() if case.mesh == mesh]
    for start in range(0, len(cases), CASES_PER_WORLD):
        assert failures(cases[start : start + CASES_PER_WORLD]) == []
