"""The latent-attention decoder against an independent re-implementation with einsum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paralign.errors import ConfigError
from paralign.models.pangu_moe.model import PanguMoe
from paralign.models.pangu_moe.presets import PanguMoeConfig
from paralign.models.pangu_moe.presets import tiny as tiny_config
from tests.models.helpers import attend, batch, linear, rms_norm, swiglu, take, tiny, turn


def attention(
    c: PanguMoeConfig, p: Mapping[str, Tensor], at: str, h: Tensor, where: Tensor
) -> Tensor:
    heads, nope, rope = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
    q_latent = rms_norm(linear(h, p, f"{at}.q_down"), p[f"{at}.q_norm.weight"], c.norm_eps)
    q = linear(q_latent, p, f"{at}.q_up").unflatten(-1, (heads, nope + rope))
    down = linear(h, p, f"{at}.kv_down")
    kv_latent = rms_norm(down[..., : c.kv_lora_rank], p[f"{at}.kv_norm.weight"], c.norm_eps)
    kv = linear(kv_latent, p, f"{at}.kv_up").unflatten(-1, (heads, nope + c.v_head_dim))
    shared = turn(down[..., c.kv_lora_rank :].unsqueeze(2), where, c.rope_theta)
    q = torch.cat((q[..., :nope], turn(q[..., nope:], where, c.rope_theta)), -1)
    k = torch.cat((kv[..., :nope], shared.repeat(1, 1, heads, 1)), -1)
    return linear(attend(q, k, kv[..., nope:]), p, f"{at}.out")


def formula(
    c: PanguMoeConfig, p: Mapping[str, Tensor], tokens: Tensor, positions: Tensor
) -> Tensor:
    x = p["embedding.weight"][tokens]
    for index in range(c.num_layers):
        at = f"layers.{index}"
        h = rms_norm(x, p[f"{at}.attention_norm.weight"], c.norm_eps)
        x = x + attention(c, p, f"{at}.attention", h, positions)
        x = x + swiglu(rms_norm(x, p[f"{at}.ffn_norm.weight"], c.norm_eps), p, f"{at}.ffn")
    return linear(rms_norm(x, p["norm.weight"], c.norm_eps), p, "head")


@pytest.mark.parametrize("v_head_dim", [16, 24, 10])
@pytest.mark.parametrize("bias", [False, True])
def test_model_matches_the_formula(v_head_dim, bias):
    model, config, _ = tiny("pangu_moe", v_head_dim=v_head_dim, bias=bias)
    data = batch()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = formula(config, parameters, data["tokens"], data["positions"])
    torch.testing.assert_close(model(data["tokens"]), expected, rtol=1e-11, atol=1e-12)


def test_positions_given_equal_positions_by_default():
    model, _, _ = tiny("pangu_moe")
    data = batch()
    assert torch.equal(model(data["tokens"]), model(data["tokens"], data["positions"]))


def test_only_distances_of_positions_matter():
    model, _, _ = tiny("pangu_moe")
    data = batch()
    moved = model(data["tokens"], data["positions"] + 100)
    torch.testing.assert_close(moved, model(data["tokens"]), rtol=1e-10, atol=1e-11)
    stretched = model(data["tokens"], data["positions"] * 2)
    assert (stretched - moved).abs().max() > 1e-3


def test_all_heads_share_one_rotary_key_and_only_it_is_turned():
    model, config, blueprint = tiny("pangu_moe")
    seen: list[Tensor] = []
    layer = model.get_submodule("layers.0")
    core = layer.get_submodule("attention.core")
    core.register_forward_pre_hook(lambda _, qkv: seen.append(qkv[1]))
    data = batch()
    for positions in (data["positions"], data["positions"] + 5):
        moved = {**data, "positions": positions}
        context = blueprint.context(moved, seq_len=16)
        blueprint.layer(layer, blueprint.prologue(model, moved, context), context)
    first, second = seen
    nope = config.qk_nope_head_dim
    assert first.shape == (2, 4, 16, nope + config.qk_rope_head_dim)
    assert torch.equal(first[:, 0, :, nope:], first[:, 3, :, nope:])
    assert not torch.equal(first[:, 0, :, :nope], first[:, 3, :, :nope])
    assert torch.equal(first[..., :nope], second[..., :nope])
    assert not torch.equal(first[..., nope:], second[..., nope:])


def test_biases_are_on_every_linear_layer():
    model, _, _ = tiny("pangu_moe", bias=True)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 4 * 8 + 1 and all(m.bias is not None for m in linears)
    plain, _, _ = tiny("pangu_moe")
    assert not [name for name, _ in plain.named_parameters() if name.endswith("bias")]


def test_tied_embeddings_are_one_parameter():
    model, _, _ = tiny("pangu_moe", tie_embeddings=True)
    assert isinstance(model, PanguMoe) and model.head.weight is model.embedding.weight
    untied, _, _ = tiny("pangu_moe")
    assert isinstance(untied, PanguMoe) and untied.head.weight is not untied.embedding.weight


def test_all_parameters_get_a_gradient():
    model, _, _ = tiny("pangu_moe", bias=True)
    model(batch()["tokens"]).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_token_wise_parts_of_a_slice_are_slices():
    model, _, blueprint = tiny("pangu_moe", bias=True)
    whole, index = batch(), torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    layer = model.get_submodule("layers.0")
    seen: list[list[Tensor]] = []
    core = layer.get_submodule("attention.core")
    core.register_forward_pre_hook(lambda _, qkv: seen.append(list(qkv)))
    for data in (whole, take(whole, index)):
        context = blueprint.context(data, seq_len=16)
        blueprint.layer(layer, blueprint.prologue(model, data, context), context)
    for of_whole, of_part in zip(*seen, strict=True):
        torch.testing.assert_close(of_part, of_whole[:, :, index], rtol=1e-13, atol=1e-15)


def test_a_config_that_breaks_a_rule_is_refused():
    with pytest.raises(ConfigError) as error:
        PanguMoe(replace(tiny_config(), qk_rope_head_dim=7))
    assert str(error.value) == (
        "cannot build a pangu_moe model: qk_rope_head_dim=7 must be even, since rotary positions "
        "turn pairs of features. Use qk_rope_head_dim=8."
    )
