from __future__ import annotations

import pytest

from paralign.config.fitting import fitting_meshes
from paralign.config.presets import PRESETS
from paralign.config.rules import find_problems
from paralign.config.run import MeshSection


def fits(preset: str, world_size: int, **rest: int) -> list[str]:
    config = PRESETS[preset]()
    return fitting_meshes(
        config, world_size, is_sound=lambda other: not find_problems(other), **rest
    )


def test_the_nearest_mesh_comes_first_and_ep_follows_what_it_is_carved_out_of():
    assert fits("pangu_moe_8", 8)[0] == "{dp_shard: 4, tp: 2, ep: 4}"
    assert fits("pangu_moe_8", 4)[0] == "{dp_shard: 2, tp: 2, ep: 4}"
    assert fits("pangu_moe_8", 2)[0] == "{tp: 2, ep: 2}"
    assert fits("pangu_moe_8", 1) == ["{}"]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_every_mesh_that_is_offered_has_the_ranks_and_breaks_no_rule(world_size):
    config = PRESETS["pangu_moe_8"]()
    found = fits("pangu_moe_8", world_size, most=20)
    assert len(set(found)) == len(found) > 0
    for text in found:
        pairs = [pair.split(": ") for pair in text.strip("{}").split(", ") if pair]
        mesh = MeshSection(**{axis: int(degree) for axis, degree in pairs})
        assert mesh.degrees.world_size == world_size
        assert find_problems(config.model_copy(update={"mesh": mesh})) == []


def test_only_so_many_are_offered():
    assert len(fits("pangu_moe_8", 8, most=3)) == 3


def test_nothing_is_offered_where_nothing_fits():
    assert fits("pangu_moe_1", 7) == []  # neither rows, nor heads, nor layers divide by seven
