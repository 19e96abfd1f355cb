from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.own_model import OwnBlueprint, OwnModel
from paralign.config.load import load_config
from paralign.errors import ConfigError
from paralign.models.llama.blueprint import LlamaBlueprint
from paralign.parallel.data import FSDP, Precision
from paralign.parallel.pipeline import Pipeline
from paralign.parallelize import Context
from paralign.randomness import Init
from paralign.train.build import (
    build_data,
    build_pieces,
    build_plans,
    init_rule,
    initialise_whole,
    numerics,
)
from tests import parity
from tests.parity import make_config

ROOT = Path(__file__).parents[2]


def dtypes(name: str, **precision: str) -> tuple[torch.dtype, ...]:
    made = numerics(name, make_config(precision=precision))
    assert made.name == name
    return made.master, made.compute, made.reduce


def test_dtypes_of_a_run():
    f64, f32, bf16 = torch.float64, torch.float32, torch.bfloat16
    assert dtypes("float64") == (f64, f64, f64)
    assert dtypes("float32") == (f32, f32, f32)
    assert dtypes("bfloat16") == (f32, bf16, f32)
    assert dtypes("bfloat16", reduce="bfloat16") == (f32, bf16, bf16)


def test_nothing_is_cast_where_everything_has_one_dtype():
    config = make_config()
    assert numerics("float64", config).precision == Precision()
    assert numerics("bfloat16", config).precision == Precision(
        compute=torch.bfloat16, reduce=torch.float32
    )


def test_a_model_of_paraligns_is_built_on_the_meta_device():
    model, blueprint = build_pieces(make_config(), torch.float64)
    assert isinstance(blueprint, LlamaBlueprint)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float64)}


def test_a_users_own_model_is_built_from_the_seed(monkeypatch):
    monkeypatch.chdir(ROOT)

    def weights(seed: int) -> dict[str, torch.Tensor]:
        path = "examples/own_model.yaml"
        config = load_config(path, [f"align.seed={seed}"])
        model, blueprint = build_pieces(config, torch.float32)
        assert isinstance(model, OwnModel) and isinstance(blueprint, OwnBlueprint)
        return dict(model.named_parameters())

    one, same, other = weights(1), weights(1), weights(2)
    name = "blocks.0.gate.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_noise_replaces_only_constants():
    _, blueprint = build_pieces(make_config(), torch.float32)
    rule = init_rule(make_config(align={"jitter": 0.25}), blueprint)
    assert rule("norm.weight", (4,)) == Init.normal(mean=1.0, std=0.25)
    assert rule("layers.0.attention.wq.bias", (4,)) == Init.normal(mean=0.0, std=0.25)
    matrix = blueprint.init("layers.0.attention.wq.weight", (4, 4))
    assert rule("layers.0.attention.wq.weight", (4, 4)) == matrix
    quiet = init_rule(make_config(align={"jitter": 0.0}), blueprint)
    assert quiet("norm.weight", (4,)) == Init.constant(1.0)


@pytest.mark.parametrize("is_meta", [True, False])
def test_a_whole_model_is_filled_in_place_and_ties_and_flags_survive(is_meta):
    config = make_config(model={**parity.BASE["model"], "tie_embeddings": True})
    model, blueprint = build_pieces(config, torch.float64)
    model.get_parameter("norm.weight").requires_grad_(False)
    if not is_meta:
        model = model.to_empty(device="cpu")
        model.get_submodule("head").weight = model.get_parameter("embedding.weight")
    made = initialise_whole(model, init_rule(config, blueprint), seed=3)
    assert made is model
    assert made.get_parameter("head.weight") is made.get_parameter("embedding.weight")
    assert not made.get_parameter("norm.weight").requires_grad
    assert made.get_parameter("embedding.weight").requires_grad
    for name, parameter in made.named_parameters():
        assert not parameter.is_meta and parameter.isfinite().all()
        assert parameter.std() > 0, name  # nothing starts constant


def test_the_seed_decides_the_weights():
    config = make_config()

    def weight(seed: int) -> torch.Tensor:
        model, blueprint = build_pieces(config, torch.float64)
        initialise_whole(model, init_rule(config, blueprint), seed=seed)
        return model.get_parameter("layers.1.ffn.up.weight")

    assert torch.equal(weight(0), weight(0))
    assert not torch.equal(weight(0), weight(1))


def test_data_has_the_batch_of_the_config_and_its_seed():
    def batch(seed: int) -> dict[str, torch.Tensor]:
        config = make_config(
            batch={"global_batch": 16, "seq_len": 24},
            data={"padding": 0.5},
            align={"seed": seed},
        )
        return dict(build_data(config).global_batch(0))

    one, same, other = batch(0), batch(0), batch(1)
    assert one["tokens"].shape == one["labels"].shape == (16, 24)
    assert torch.equal(one["tokens"], same["tokens"])
    assert not torch.equal(one["tokens"], other["tokens"])
    assert len(set((one["labels"] == -100).sum(1).tolist())) > 1  # padding is uneven


def test_plans_get_every_setting():
    config = make_config(
        mesh={"pp": 2, "cp": 2},
        pipeline={
            "schedule": "LoopedBFS",
            "num_microbatches": 8,
            "stages_per_rank": 2,
            "layers_per_stage": [1, 1, 1, 1],
        },
        fsdp={"wrap": [["layers.0"]], "reshard_after_forward": True},
        context={"ulysses_degree": 1, "load_balance": True},
    )
    assert build_plans(config) == (
        Pipeline("LoopedBFS", num_microbatches=8, stages_per_rank=2, layers_per_stage=(1, 1, 1, 1)),
        FSDP(wrap=(("layers.0",),), reshard_after_forward=True),
        Context(ulysses_degree=1, load_balance=True),
    )
    assert build_plans(make_config())[1] == FSDP()  # default: torch chooses


def test_a_model_that_does_not_look_at_documents_is_not_given_isolated_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config("examples/own_model.yaml", ["data.packing=isolated"])
    with pytest.raises(ConfigError, match=r"OwnBlueprint does not say that it does.*packed"):
        build_pieces(config, torch.float64)
