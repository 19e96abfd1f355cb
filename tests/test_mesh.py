from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from paralign.errors import MeshError
from paralign.mesh import (
    FOLDS,
    MESH_AXES,
    Axis,
    Degrees,
    build_mesh,
    degrees_of,
    divisors,
    expert_mesh,
    fold,
)
from paralign.testing import run_on_ranks

SMALL = st.integers(1, 4)


def test_axes_print_as_their_names():
    assert [f"{axis}" for axis in MESH_AXES] == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]


def test_every_problem_is_said_at_once():
    with pytest.raises(MeshError) as caught:
        Degrees(pp=0, cp=-1, tp=2.0, ep=True)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "cannot build a mesh from pp=0 dp_replicate=1 dp_shard=1 cp=-1 tp=2.0 ep=True:\n"
        "  - pp=0 must be a whole number of at least 1\n"
        "  - cp=-1 must be a whole number of at least 1\n"
        "  - tp=2.0 must be a whole number of at least 1\n"
        "  - ep=True must be a whole number of at least 1"
    )


def test_ep_that_cannot_be_carved_out_names_the_degrees_that_can():
    with pytest.raises(MeshError) as caught:
        Degrees(pp=4, dp_shard=2, cp=3, ep=4)
    assert str(caught.value) == (
        "cannot build a mesh from pp=4 dp_replicate=1 dp_shard=2 cp=3 tp=1 ep=4: ep=4 is carved "
        "out of dp_shard * cp * tp = 6 and must divide it. Use ep in {1, 2, 3, 6}"
    )


def test_ep_adds_no_ranks():
    assert Degrees(dp_shard=2, cp=2, tp=2, ep=8).world_size == 8


def test_products_of_axes():
    degrees = Degrees(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert degrees.world_size == 2 * 3 * 5 * 7 * 11
    assert degrees.dp == 3 * 5
    assert degrees.fsdp == 5 * 7
    assert degrees.degree(Axis.CP) == degrees.degree("cp") == 7


def test_the_picture_in_the_module_docstring_is_right():
    degrees = Degrees(pp=2, dp_shard=2, cp=2)
    rows = {axis: [degrees.coordinates(r)[axis] for r in range(8)] for axis in ("pp", "dp_shard")}
    assert rows == {"pp": [0, 0, 0, 0, 1, 1, 1, 1], "dp_shard": [0, 0, 1, 1, 0, 0, 1, 1]}
    assert [degrees.coordinates(r)["cp"] for r in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]


@given(st.builds(Degrees, pp=SMALL, dp_replicate=SMALL, dp_shard=SMALL, cp=SMALL, tp=SMALL))
def test_coordinates_count_every_place_once_with_tp_innermost(degrees):
    places = [tuple(degrees.coordinates(r).values()) for r in range(degrees.world_size)]
    sizes = [range(degrees.degree(axis)) for axis in MESH_AXES]
    assert places == list(itertools.product(*sizes))


def test_a_rank_is_described_without_axes_of_size_one():
    assert Degrees(pp=2, dp_shard=2, cp=2).describe_rank(5) == "rank 5: pp=1 dp_shard=0 cp=1"
    assert Degrees().describe_rank(0) == "rank 0"


def test_the_wrong_world_size_is_refused_with_the_product():
    with pytest.raises(MeshError) as caught:
        Degrees(pp=2, cp=2).check_world_size(8)
    assert str(caught.value) == (
        "world size 8 does not match the mesh: pp=2 * dp_replicate=1 * dp_shard=1 * cp=2 * tp=1 "
        "= 4. Start 4 ranks or change the degrees so that they multiply to 8."
    )
    Degrees(pp=2, cp=2).check_world_size(4)


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


DEGREES = Degrees(dp_replicate=2, dp_shard=2, cp=2)


def describe_mesh():
    mesh = build_mesh(DEGREES)
    place = mesh.get_coordinate()
    assert place is not None
    coordinate = dict(zip(map(str, MESH_AXES), place, strict=True))
    groups = {
        str(view): dist.get_process_group_ranks(fold(mesh, view).get_group()) for view in FOLDS
    }
    places = {str(view): fold(mesh, view).get_local_rank() for view in FOLDS}
    return coordinate, groups, places, degrees_of(mesh), mesh.mesh_dim_names


@pytest.mark.ranks
def test_the_mesh_of_eight_ranks_has_the_coordinates_and_the_folded_views():
    for rank, seen in enumerate(run_on_ranks(describe_mesh, 8)):
        coordinate, groups, places, degrees, names = seen
        assert coordinate == DEGREES.coordinates(rank)
        assert degrees == DEGREES
        assert names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        replica = rank // 4
        first = rank - rank % 2
        assert groups == {
            "fsdp": list(range(4 * replica, 4 * replica + 4)),
            "loss": list(range(8)),
            "sequence": [first, first + 1],
            "routed": list(range(8)),
        }
        assert places == {"fsdp": rank % 4, "loss": rank, "sequence": rank % 2, "routed": rank}


def build_for_another_world():
    build_mesh(Degrees(pp=4))


def read_foreign_mesh():
    degrees_of(init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")))


@pytest.mark.ranks
def test_a_mesh_of_another_world_size_is_refused_on_ranks():
    with pytest.raises(MeshError, match="world size 2 does not match the mesh: pp=4"):
        run_on_ranks(build_for_another_world, 2)


@pytest.mark.ranks
def test_a_mesh_without_the_axes_is_refused():
    with pytest.raises(MeshError) as caught:
        run_on_ranks(read_foreign_mesh, 2)
    assert (
        "the mesh has axes ('pp', 'dp') and lacks dp_replicate, dp_shard, cp, tp. "
        "Build it with pa.build_mesh(pa.Degrees(...))." in str(caught.value)
    )


def carved(degrees: Degrees) -> dict[str, Any]:
    mesh = build_mesh(degrees)
    experts = expert_mesh(mesh)
    groups = {
        name: dist.get_process_group_ranks(experts[name].get_group()) for name in ("efsdp", "ep")
    }
    return {**groups, "degrees": degrees_of(mesh)}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "degrees", [Degrees(dp_shard=2, cp=2, ep=2), Degrees(dp_shard=2, tp=2, ep=2)]
)
def test_ep_is_carved_out_of_the_inner_axes_with_neighbours_together(degrees):
    outcomes = run_on_ranks(carved, 4, degrees)
    assert [o["ep"] for o in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [o["efsdp"] for o in outcomes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {o["degrees"] for o in outcomes} == {degrees}


@pytest.mark.ranks
def test_with_tp_experts_are_sharded_over_it_also_without_ep():
    outcomes = run_on_ranks(carved, 4, Degrees(dp_shard=2, tp=2))
    assert [o["efsdp"] for o in outcomes] == [[0, 1, 2, 3]] * 4
    assert [o["ep"] for o in outcomes] == [[0], [1], [2], [3]]


def not_carved() -> str:
    try:
        expert_mesh(build_mesh(Degrees()))
    except MeshError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_mesh_without_ep_has_no_experts():
    assert run_on_ranks(not_carved, 1) == [
        "the mesh has no axis 'ep'. Build it with pa.build_mesh(pa.Degrees(..., ep=...))."
    ]
