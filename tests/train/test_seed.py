from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.launch import run_ranks
from paralign.train.build import build_pieces, init_rule, initialise_whole
from paralign.train.checkpoint import find_checkpoints
from paralign.train.seed import write_seed_on_rank
from tests import parity
from tests.train.runs import run, tensors_in, training_config
from tests.weights.published import tensors_of


def seed(config: RunConfig, folder: Path) -> dict[str, torch.Tensor]:
    run_ranks(write_seed_on_rank, config.mesh.degrees.world_size, config, folder, timeout=60)
    [found] = find_checkpoints(folder)
    assert found.step == 0
    return tensors_in(found)


@pytest.mark.ranks
def test_every_mesh_writes_the_same_bits_and_nothing_but_weights(tmp_path: Path) -> None:
    model = {**parity.PANGU, "preset": "tiny", "tie_embeddings": True, "bias": False}
    one = training_config(tmp_path / "run", model=model)
    mesh = {"pp": 2, "dp_shard": 2, "ep": 2}
    many = training_config(tmp_path / "run", model=model, mesh=mesh)
    alone = seed(one, tmp_path / "one")
    spread = seed(many, tmp_path / "many")
    assert alone.keys() == spread.keys()
    assert all(torch.equal(spread[name], tensor) for name, tensor in alone.items())
    whole, blueprint = build_pieces(one, torch.float64)
    training = one.for_training()
    initialise_whole(whole, init_rule(training, blueprint), seed=training.align.seed)
    expected = tensors_of(whole)
    assert alone.keys() == expected.keys()
    assert all(torch.equal(alone[name], tensor) for name, tensor in expected.items())


@pytest.mark.ranks
def test_a_run_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    config = training_config(tmp_path)
    seed(config, tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="holds only weights, so a run can start from it but not"):
        run(config)
