"""The llama decoder against an independent re-implementation with einsum."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from paralign.errors import ConfigError
from paralign.models.llama.model import Llama
from paralign.models.llama.presets import LlamaConfig
from tests.models.helpers import attend, batch, linear, rms_norm, swiglu, take, tiny, turn


def formula(
    config: LlamaConfig, p: Mapping[str, Tensor], tokens: Tensor, positions: Tensor
) -> Tensor:
    x = p["embedding.weight"][tokens]
    groups = config.num_heads // config.num_kv_heads
    for index in range(config.num_layers):
        at = f"layers.{index}"
        h = rms_norm(x, p[f"{at}.attention_norm.weight"], config.norm_eps)
        q, k, v = (
            linear(h, p, f"{at}.attention.{name}").unflatten(-1, (-1, config.head_dim))
            for name in ("wq", "wk", "wv")
        )
        q, k = turn(q, positions, config.rope_theta), turn(k, positions, config.rope_theta)
        mixed = attend(q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))
        x = x + linear(mixed, p, f"{at}.attention.wo")
        x = x + swiglu(rms_norm(x, p[f"{at}.ffn_norm.weight"], config.norm_eps), p, f"{at}.ffn")
    return linear(rms_norm(x, p["norm.weight"], config.norm_eps), p, "head")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_model_matches_the_formula(kv_heads, bias, tied):
    model, config, _ = tiny("llama", num_kv_heads=kv_heads, bias=bias, tie_embeddings=tied)
    data = batch()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = formula(config, parameters, data["tokens"], data["positions"])
    torch.testing.assert_close(model(data["tokens"]), expected, rtol=1e-11, atol=1e-12)


def test_positions_given_equal_positions_by_default():
    model, _, _ = tiny("llama")
    data = batch()
    assert torch.equal(model(data["tokens"]), model(data["tokens"], data["positions"]))


def test_only_distances_of_positions_matter():
    model, _, _ = tiny("llama")
    data = batch()
    moved = model(data["tokens"], data["positions"] + 100)
    torch.testing.assert_close(moved, model(data["tokens"]), rtol=1e-10, atol=1e-11)
    stretched = model(data["tokens"], data["positions"] * 2)
    assert (stretched - moved).abs().max() > 1e-3


def test_later_tokens_do_not_change_earlier_logits():
    model, _, _ = tiny("llama")
    tokens = batch()["tokens"]
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-12, atol=1e-13)
    assert bool((before[:, 10:] != after[:, 10:]).any(-1).all())


def test_biases_are_on_every_linear_layer():
    model, _, _ = tiny("llama", bias=True)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 4 * 7 + 1 and all(m.bias is not None for m in linears)
    plain, _, _ = tiny("llama")
    assert not [name for name, _ in plain.named_parameters() if name.endswith("bias")]


def test_tied_embeddings_are_one_parameter():
    model, config, _ = tiny("llama", tie_embeddings=True)
    assert isinstance(model, Llama) and model.head.weight is model.embedding.weight
    untied, _, _ = tiny("llama")
    assert isinstance(untied, Llama) and untied.head.weight is not untied.embedding.weight
    count = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in model.parameters())
    assert count == config.vocab_size * config.hidden_size


def test_all_parameters_get_a_gradient():
    model, _, _ = tiny("llama", bias=True)
    model(batch()["tokens"]).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_token_wise_parts_of_a_slice_are_slices():
    # What context parallel relies on: all but the core treats each token alone, by its position.
    model, _, blueprint = tiny("llama", bias=True)
    whole, index = batch(), torch.tensor([0, 1, 2, 3, 12, 13, 14, 15])
    part = take(whole, index)
    layer = model.get_submodule("layers.0")
    seen: list[list[Tensor]] = []
    core = layer.get_submodule("attention.core")
    core.register_forward_pre_hook(lambda _, qkv: seen.append(list(qkv)))
    outputs = []
    for data in (whole, part):
        context = blueprint.context(data, seq_len=16)
        x = blueprint.prologue(model, data, context)
        blueprint.layer(layer, x, context)
        outputs.append((x, blueprint.epilogue(model, x, context)))
    for of_whole, of_part in zip(*seen, strict=True):
        torch.testing.assert_close(of_part, of_whole[:, :, index], rtol=1e-13, atol=1e-15)
    for of_whole, of_part in zip(*outputs, strict=True):
        torch.testing.assert_close(of_part, of_whole[:, index], rtol=1e-13, atol=1e-15)


def test_a_config_that_breaks_rules_is_refused_with_all_of_them():
    config = LlamaConfig(
        num_layers=1, hidden_size=66, ffn_hidden_size=8, num_heads=4, num_kv_heads=3, vocab_size=9
    )
    with pytest.raises(ConfigError) as error:
        Llama(config)
    assert str(error.value) == (
        "cannot build a llama model:\n"
        "  - hidden_size=66 must be a multiple of num_heads=4 (remainder 2). Use hidden_size=68.\n"
        "  - num_heads=4 must be a multiple of num_kv_heads=3 (remainder 1). Use num_heads=6."
    )
