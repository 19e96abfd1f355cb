from __future__ import annotations

import pytest

from paralign.config.run import RunConfig
from paralign.config.shrink_mesh import lost_axes, small_meshes
from paralign.errors import ConfigError
from paralign.mesh import Degrees


def best(world_size, context=None, **mesh):
    config = RunConfig.model_validate({"mesh": mesh, "context": context or {}})
    return small_meshes(config, world_size)[0]


LARGE = {"pp": 8, "dp_replicate": 2, "dp_shard": 8, "cp": 4, "tp": 8, "ep": 32}


@pytest.mark.parametrize(
    ("world_size", "mesh", "expected"),
    [
        (8, {"pp": 8, "dp_shard": 16, "tp": 4}, Degrees(pp=2, dp_shard=2, tp=2)),
        (8, {"pp": 8, "dp_shard": 16, "tp": 4, "ep": 16}, Degrees(pp=2, dp_shard=2, tp=2, ep=2)),
        # Experts that FSDP leaves alone, because ep takes all of its ranks, stay so.
        (8, {"pp": 8, "dp_shard": 4, "tp": 4, "ep": 16}, Degrees(pp=2, dp_shard=2, tp=2, ep=4)),
        (8, {"pp": 2, "cp": 8}, Degrees(pp=2, cp=4)),
        (6, {"pp": 8, "dp_shard": 16}, Degrees(pp=2, dp_shard=3)),
        (16, LARGE, Degrees(pp=2, dp_shard=2, cp=2, tp=2, ep=4)),
        (8, LARGE, Degrees(pp=2, cp=2, tp=2, ep=2)),
        (4, LARGE, Degrees(pp=2, tp=2, ep=2)),
        (1, LARGE, Degrees()),
        (None, LARGE, Degrees(pp=2, cp=2, tp=2, ep=2)),
        (None, {"dp_shard": 3, "pp": 2}, Degrees(dp_shard=3, pp=2)),
        (None, {"cp": 5}, Degrees(cp=5)),
    ],
)
def test_the_mesh_that_is_chosen(world_size, mesh, expected):
    assert best(world_size, **mesh) == expected


def test_both_ways_of_context_parallel_get_four_ranks_where_there_are_so_many():
    mesh = {"pp": 8, "cp": 8}
    assert best(16, {"ulysses_degree": 2}, **mesh, dp_shard=4) == Degrees(pp=2, cp=4, dp_shard=2)
    assert best(16, {"ulysses_degree": 8}, **mesh, dp_shard=4) != Degrees(pp=2, cp=4, dp_shard=2)


def test_what_is_lost():
    large = Degrees(**LARGE)
    assert lost_axes(large, best(8, **LARGE)) == ["dp_replicate", "dp_shard"]
    assert lost_axes(large, Degrees(pp=2, cp=2)) == ["dp_replicate", "dp_shard", "tp", "ep"]
    assert lost_axes(Degrees(dp_shard=4), Degrees(dp_shard=2)) == []
    assert lost_axes(Degrees(cp=4, ep=2), Degrees(cp=2, ep=2)) == ["efsdp"]


def test_a_number_of_ranks_that_no_mesh_has_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no mesh of 7 ranks .* Use --world 6 or 8\."):
        best(7, pp=3, tp=4, cp=2)
    with pytest.raises(ConfigError, match=r"pp=2 .* Use --world 4\."):
        best(8, pp=2, cp=2)
