"""The pieces of the pangu_moe decoder."""

from __future__ import annotations

import math

import torch

from paralign.models.compose import structure_problems
from paralign.models.pangu_moe.blueprint import PanguMoeBlueprint
from paralign.randomness import Init
from tests.models.helpers import batch, take, tiny


def test_pieces_own_every_parameter_once():
    model, _, blueprint = tiny("pangu_moe", bias=True)
    assert isinstance(blueprint, PanguMoeBlueprint)
    assert structure_problems(model, blueprint) == []


def test_context_of_a_slice_is_the_slice_of_the_context():
    _, _, blueprint = tiny("pangu_moe")
    data, index = batch(), torch.tensor([3, 15, 8])
    whole = blueprint.context(data, seq_len=16)
    part = blueprint.context(take(data, index), seq_len=16)
    for of_whole, of_part in zip(whole.rotary, part.rotary, strict=True):
        assert torch.equal(of_whole[:, :, index], of_part)


def test_every_parameter_has_a_start_that_fits_it():
    model, config, blueprint = tiny("pangu_moe", bias=True, num_layers=8, init_std=0.5)
    kinds = {name: blueprint.init(name, tuple(p.shape)) for name, p in model.named_parameters()}
    residual = Init.normal(std=0.5 / math.sqrt(16))
    assert config.num_layers == 8
    for name, init in kinds.items():
        if name.endswith(".bias"):
            assert init == Init.constant(0.0), name
        elif "norm" in name:
            assert init == Init.constant(1.0), name
        elif name.endswith(("attention.out.weight", "ffn.down.weight")):
            assert init == residual, name
        else:
            assert init == Init.normal(std=0.5), name
    assert list(kinds.values()).count(residual) == 16


def test_forward_uses_the_positions_of_the_batch():
    model, _, blueprint = tiny("pangu_moe")
    data = batch()
    moved = {**data, "positions": data["positions"] * 3}
    assert torch.equal(blueprint.forward(model, moved), model(data["tokens"], moved["positions"]))
    assert not torch.equal(blueprint.forward(model, moved), blueprint.forward(model, data))


def test_the_attention_core_is_named_with_its_layout():
    model, _, blueprint = tiny("pangu_moe")
    assert list(blueprint.attention()) == ["attention.core"]
    style = blueprint.attention()["attention.core"]
    assert (style.seq_dim, style.head_dim) == (2, 1)
    model.get_submodule("layers.3.attention.core")
