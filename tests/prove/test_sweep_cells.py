from __future__ import annotations

from itertools import combinations

import pytest

from paralign.prove.sweep_cells import Cell, cells_of, factorisations, pairs_cover
from tests.parity import BASE, make_config


def test_every_factorisation_is_there_once():
    found = list(factorisations(8))
    assert len(found) == 35
    assert len({tuple(mesh.items()) for mesh in found}) == 35
    for mesh in found:
        product = 1
        for degree in mesh.values():
            product *= degree
        assert product == 8


def test_schedules_are_tried_where_there_is_a_pipeline():
    cells = cells_of(make_config(), 2)
    by_mesh: dict[tuple[tuple[str, int], ...], list[Cell]] = {}
    for cell in cells:
        by_mesh.setdefault(cell.mesh, []).append(cell)
    counts = {dict(mesh)["pp"]: len(of_mesh) for mesh, of_mesh in by_mesh.items()}
    assert counts == {1: 1, 2: 7}
    assert len({cell.name for cell in cells}) == len(cells)


def test_a_refused_cell_says_why_and_has_no_config():
    cells = {cell.name: cell for cell in cells_of(make_config(batch={"seq_len": 15}), 2)}
    refused = cells["cp2-1F1B"]
    assert refused.config is None
    assert "seq_len=15" in refused.why
    ran = cells["pp2-GPipe"]
    assert ran.why == ""
    assert ran.config is not None
    assert (ran.config.mesh.pp, ran.config.pipeline.schedule) == (2, "GPipe")


def test_what_fitted_only_the_configs_own_pipeline_is_left_open():
    config = make_config(
        mesh={"pp": 2},
        pipeline={
            "schedule": "Interleaved1F1B",
            "stages_per_rank": 2,
            "layers_per_stage": (1, 1, 1, 1),
        },
    )
    cells = {cell.name: cell for cell in cells_of(config, 4)}
    kept, other = cells["pp2-cp2-Interleaved1F1B"].config, cells["pp4-GPipe"].config
    assert kept is not None
    assert other is not None
    assert kept.pipeline.layers_per_stage == (1, 1, 1, 1)
    assert cells["pp2-cp2-GPipe"].config is None  # four sizes do not fit its two stages
    assert other.pipeline.layers_per_stage is None
    assert other.pipeline.stages_per_rank is None


def test_a_program_of_the_users_own_gets_no_schedules():
    config = make_config().model_copy(update={"program": "examples.own_program:build"})
    assert {cell.schedule for cell in cells_of(config, 2)} == {"1F1B"}


def test_only_a_model_with_a_plan_is_spread_over_tp():
    def degrees(config):
        return {dict(cell.mesh).get("tp", "kept") for cell in cells_of(config, 4)}

    config = make_config()
    assert degrees(config) == {1, 2, 4}
    assert degrees(config.model_copy(update={"program": "examples.own_program:build"})) == {"kept"}
    refused = make_config(
        model={**BASE["model"], "num_heads": 6, "num_kv_heads": 6, "hidden_size": 36}
    )
    cells = {cell.name: cell for cell in cells_of(refused, 4)}
    assert "num_heads=6 does not split evenly over axis 'tp'" in cells["tp4-1F1B"].why


@pytest.mark.long
def test_experts_are_spread_over_every_part_of_the_carved_axes():
    def meshes(config):
        return [dict(cell.mesh) for cell in cells_of(config, 4)]

    assert all("ep" not in mesh for mesh in meshes(make_config()))
    experts = make_config(model={"name": "llama", "preset": "mixtral_tiny", "num_experts": 6})
    found = {(m["pp"], m["dp_replicate"], m["dp_shard"], m["cp"], m["ep"]) for m in meshes(experts)}
    assert {(1, 1, 4, 1, 1), (1, 1, 4, 1, 2), (1, 1, 4, 1, 4), (1, 1, 2, 2, 4)} <= found
    assert {ep for pp, replicate, *_, ep in found if pp * replicate == 2} == {1, 2}
    assert {ep for pp, replicate, *_, ep in found if pp * replicate == 4} == {1}
    cells = {cell.name: cell for cell in cells_of(experts, 4)}
    ran, refused = cells["dp_shard4-ep2-1F1B"], cells["dp_shard4-ep4-1F1B"]
    assert ran.config is not None
    assert ran.config.mesh.ep == 2
    assert "num_experts=6 does not split evenly over axis 'ep'" in refused.why
    assert cells["dp_shard4-1F1B"].config is not None  # ep=1: not the config's own


def test_an_ep_of_the_configs_own_is_replaced_where_there_are_experts():
    experts = make_config(
        model={"name": "llama", "preset": "mixtral_tiny"}, mesh={"dp_shard": 4, "ep": 4}
    )
    cells = {cell.name: cell for cell in cells_of(experts, 2)}
    assert cells["pp2-GPipe"].config is not None
    assert cells["pp2-GPipe"].config.mesh.ep == 1


def test_pairs_are_all_covered_by_fewer_cells():
    cells = cells_of(make_config(), 4)
    runnable = [cell for cell in cells if cell.config is not None]
    chosen = pairs_cover(cells)
    assert set(chosen) <= set(runnable)
    assert 0 < len(chosen) <= len(runnable)

    def pairs(of):
        return {
            pair
            for cell in of
            for pair in combinations([*cell.mesh, ("schedule", cell.schedule)], 2)
        }

    assert pairs(chosen) == pairs(runnable)
