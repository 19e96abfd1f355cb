"""Twenty optimizer steps on ten meshes: parameters and moments stay those of one rank."""

from __future__ import annotations

import pytest

from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config, worst

MESHES = (
    {"pp": 2},
    {"dp_shard": 4},
    {"cp": 2},
    {"tp": 2},
    {"dp_replicate": 2, "dp_shard": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "cp": 2},
    {"dp_shard": 2, "tp": 2},
    {"cp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2},
)
TOLERANCE = 1e-12
SECTIONS = {
    "model": {"dropout": 0.1},
    "train": {"steps": 20, "accumulate": 2},
    "data": {"padding": 0.5},
    "optimizer": {"lr": 3e-3, "clip": 0.5, "decay": "matrices"},
    "schedule": {"name": "cosine", "warmup_steps": 4, "min_ratio": 0.1},
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    config = training_config(tmp_path_factory.mktemp("alone"), **SECTIONS)
    run(config)
    return tensors_in(newest(config)), read_metrics(newest(config).path.parents[1])


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh", MESHES, ids=lambda mesh: " ".join(f"{a}{n}" for a, n in mesh.items())
)
def test_after_twenty_steps_it_is_the_run_on_one_rank(mesh, alone, tmp_path):
    expected, lines = alone
    assert len(lines) == 20
    assert all(line["norm"] > 0.5 for line in lines)  # clipped in every step
    config = training_config(tmp_path, mesh=mesh, **SECTIONS)
    run(config)
    assert worst(tensors_in(newest(config)), expected) <= TOLERANCE
    for line, other in zip(read_metrics(tmp_path), lines, strict=True):
        assert line["num_tokens"] == other["num_tokens"]
        assert abs(line["loss"] - other["loss"]) <= TOLERANCE * other["loss"]
