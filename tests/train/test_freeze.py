"""Frozen parameters stay as they are in training, and the others are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.prove.run import align
from paralign.train.build import build_pieces, init_rule, initialise_whole
from paralign.train.freeze import freeze
from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config, worst


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight


def trained(*patterns: str) -> list[str]:
    model = Toy()
    freeze(model, patterns)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_names_and_patterns_freeze_and_either_name_of_a_tied_parameter():
    everything = trained()
    assert everything[0] == "embedding.weight" and len(everything) == 5
    assert trained("layers.0.*") == [n for n in everything if not n.startswith("layers.0")]
    assert trained("*.bias", "embedding.weight") == ["layers.0.weight", "layers.1.weight"]
    assert trained("head.*") == everything[1:]


def test_what_matches_nothing_or_everything_is_refused():
    with pytest.raises(ConfigError) as caught:
        trained("layers.2.*", "embeding.weight", "layers.0.*")
    assert str(caught.value).count("\n") == 2
    assert "optimizer.freeze has 'layers.2.*', which matches no parameter" in str(caught.value)
    assert "Did you mean 'embedding.weight'?" in str(caught.value)
    with pytest.raises(ConfigError, match="matches every parameter, so nothing would be trained"):
        trained("*")


# The first stage of two is frozen as a whole, with decay that would move it; or a tied pair, which
# has a copy on both stages.
CASES: dict[str, tuple[dict[str, Any], list[str], list[dict[str, int]]]] = {
    "a stage": ({}, ["embedding.*", "layers.0.*", "layers.1.*"], [{"pp": 2}]),
    "a stage, on other meshes": (
        {"dropout": 0.1},
        ["embedding.*", "layers.0.*", "layers.1.*"],
        [{"pp": 2, "dp_shard": 2}, {"tp": 2}],
    ),
    "a tied pair": (
        {"tie_embeddings": True, "bias": False},
        ["head.*", "layers.*.ffn.*"],
        [{"pp": 2, "cp": 2}],
    ),
}


def start_of(config: RunConfig) -> dict[str, Tensor]:
    """Return the weights that a training run starts with."""
    config = config.for_training()
    model, blueprint = build_pieces(config, torch.float64)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "what", ["a stage", *(pytest.param(n, marks=pytest.mark.long) for n in list(CASES)[1:])]
)
def test_a_run_on_any_mesh_and_one_that_goes_on_leave_them_alone(what, tmp_path):
    model, patterns, meshes = CASES[what]
    sections = {
        "model": model,
        "optimizer": {"lr": 3e-3, "clip": 0.2, "weight_decay": 0.3, "freeze": patterns},
    }
    alone = training_config(tmp_path / "alone", **sections)
    run(alone)
    expected = tensors_in(newest(alone))
    assert all(line["norm"] > 0.2 for line in read_metrics(tmp_path / "alone"))  # clipped
    start = start_of(alone)
    moved = {name for name in start if not torch.equal(start[name], expected[name])}
    assert moved == {name for name in start if f"optimizer.exp_avg.{name}" in expected}
    assert set() < moved < set(start)
    for mesh in meshes:
        folder = tmp_path / "-".join(mesh)
        run(training_config(folder, mesh=mesh, **sections, train={"steps": 2}))
        whole = training_config(folder, mesh=mesh, **sections)
        _, said = run(whole)
        assert any("going on from" in text for text in said)
        # The first rank has nothing to count steps by.
        assert newest(whole).state()["optimizer_steps"] == 4
        assert worst(tensors_in(newest(whole)), expected) <= 1e-12, mesh


@pytest.mark.ranks
def test_align_freezes_on_both_sides(tmp_path):
    sections = {"optimizer": {"freeze": ["embedding.*", "layers.0.*", "layers.1.*"]}}
    config = training_config(tmp_path, mesh={"pp": 2}, **sections)
    report = align(config)
    assert report.verdict == "aligned", report.why
    compared = {row.name for row in report.tensors if row.kind == "grad"}
    assert compared and all(name.split(".")[0] != "embedding" for name in compared)
