from __future__ import annotations

from typing import Any

import pytest
import torch

from paralign.mesh import build_mesh
from paralign.models.router import named_routers
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, training_numerics
from paralign.train.expert_load import expert_loads
from tests.equivalence.test_moe import MODELS
from tests.parity import make_config

pytestmark = pytest.mark.ranks


def _loads(config: Any) -> dict[str, float]:
    program = build_program(config, training_numerics(config), mesh=build_mesh(config.mesh.degrees))
    batch = program.shard(build_data(config).global_batch(0))
    program.step(batch)
    program.update_routers()
    loads = expert_loads(program)
    assert expert_loads(program) == loads  # nothing was added up in place
    counts = {n: r.tally.taken for n, r in named_routers(program.modules).items()}
    if config.mesh.degrees.world_size == 1:
        for name, load in loads.items():
            count = counts[name]
            assert isinstance(count, torch.Tensor)
            assert load == pytest.approx(int(count.max()) / count.double().mean().item())
    return loads


def _config(model: str, **mesh: int) -> Any:
    return make_config(
        model=MODELS[model],
        mesh=mesh,
        pipeline={"schedule": "GPipe", "num_microbatches": 2},
        batch={"global_batch": 8, "seq_len": 16},
        precision={"compute": "float64", "reduce": "float64"},
    )


# One with router biases, which are told of the load, and one without.
@pytest.mark.parametrize("model", ["pangu_moe", "mixtral"])
def test_the_load_is_that_of_one_device(model):
    [alone] = run_on_ranks(_loads, 1, _config(model), timeout=60)
    by_rank = run_on_ranks(_loads, 4, _config(model, pp=2, dp_shard=2, ep=2), timeout=60)
    assert len(alone) >= 2 and all(1 < load < 8 for load in alone.values())
    first, second = by_rank[0], by_rank[2]
    assert by_rank[1] == first and by_rank[3] == second
    assert {**first, **second} == alone
    assert first and second and not first.keys() & second.keys()
