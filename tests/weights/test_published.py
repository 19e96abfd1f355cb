"""Published models against the library that defines their form: same weights, same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paralign.errors import ConfigError, TraceError
from paralign.models.registry import MODELS
from paralign.weights.folders import read_published
from paralign.weights.initial import load_initial
from paralign.weights.published import PublishedWeights
from tests.weights import published
from tests.weights.published import (
    build,
    deepseek,
    deepseek_dense,
    dense,
    distance,
    in_float64,
    library_model,
    logits,
    mixtral,
    need_library,
    write,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own

NEAR_ROUNDING = 1e-14  # measured: 0.8e-15 to 1.3e-15
FLOAT32 = 1e-5  # of the library's own float32 parts; measured: 2e-7 to 4e-7

FAMILIES = {
    "llama": dense(),
    "llama_tied": dense(tie_embeddings=True),
    "mixtral": mixtral(),
    "mixtral_tied": mixtral(tie_embeddings=True, num_kv_heads=3),
    "deepseek": deepseek(),
    "deepseek_without_groups": deepseek(num_expert_groups=1, num_limited_groups=1),
    "deepseek_as_they_are": deepseek(router_normalise="none", router_scaling=0.7),
    "deepseek_without_bias": deepseek(bias_update_speed=0.0),
    "deepseek_dense": deepseek_dense(),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_library_computes_the_same_from_what_we_write(name: str, tmp_path: Path) -> None:
    model = build(FAMILIES[name])
    library = library_model(write(tmp_path / "m", FAMILIES[name], model))
    assert distance(logits(model), logits(library)) < FLOAT32
    with in_float64():
        wide = library_model(tmp_path / "m")
        assert distance(logits(model), logits(wide)) < NEAR_ROUNDING


def from_library(folder: Path, family: tuple[str, Any], options: dict[str, Any]) -> None:
    """Let the library make and save a model of random weights."""
    need_library()
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = MODELS[family[0]].published.write(family[1]) | options.pop("entries", {})
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config).double()
    generator = torch.Generator().manual_seed(1)
    biases = {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
    with torch.no_grad():
        for name, tensor in {**dict(model.named_parameters()), **biases}.items():
            noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            tensor.copy_(noise * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        (dense(), {}),
        (dense(tie_embeddings=True), {"max_shard_size": "40KB"}),
        (mixtral(), {}),
        (mixtral(), {"save_original_format": False}),
        (deepseek(), {"max_shard_size": "100KB"}),
        (deepseek(), {"save_original_format": False}),
        (deepseek(), {"entries": {"rope_interleave": False}}),
    ],
    ids=[
        "llama",
        "tied-shards",
        "mixtral",
        "stacked",
        "deepseek-shards",
        "deepseek-stacked",
        "halves",
    ],
)
def test_we_compute_the_same_from_what_the_library_writes(
    family: tuple[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    from_library(tmp_path / "m", family, dict(options))
    found = read_published(tmp_path / "m")
    assert (found.entry.name, found.config) == family
    model = build(family, seed=9)  # other values
    assert load_initial(model, tmp_path / "m") == []
    with in_float64():
        assert distance(logits(model), logits(library_model(tmp_path / "m"))) < NEAR_ROUNDING
    index = tmp_path / "m" / "model.safetensors.index.json"
    assert index.exists() == ("max_shard_size" in options)


def test_a_model_with_the_published_names_takes_them_as_they_are(tmp_path: Path) -> None:
    family = deepseek()
    library = library_model(write(tmp_path / "m", family, build(family)))
    expected = {n: t.clone() for n, t in library.state_dict().items()}
    with torch.no_grad():
        for tensor in library.state_dict().values():
            tensor.zero_()
    # The library holds experts stacked, and says so by other names than those in the files.
    save_file(expected, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    assert load_initial(library, tmp_path / "m") == []
    assert all(torch.equal(t, expected[n]) for n, t in library.state_dict().items())


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def reconfigure(folder: Path, **entries: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | entries))


def _swap(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def _mix_heads(tensors: dict[str, torch.Tensor]) -> None:
    """Put key heads in the order in which they would serve query heads in turn."""
    key = tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = (
        key.unflatten(0, (2, 3, 8)).transpose(0, 1).flatten(0, 2)
    )


def _neighbours(tensors: dict[str, torch.Tensor]) -> None:
    """Pair neighbours instead of halves, in queries and keys."""
    for name in ("q_proj", "k_proj"):
        key = f"model.layers.0.self_attn.{name}.weight"
        tensors[key] = tensors[key].unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


def _key_first(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    tensors[name] = tensors[name].roll(8, 0)


def _values_first(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    nope, value = tensors[name].unflatten(0, (3, 16)).split([10, 6], dim=1)
    tensors[name] = torch.cat([value, nope], dim=1).flatten(0, 1)


EXPERT = "model.layers.1.mlp.experts.0"
MIXTRAL_EXPERT = "model.layers.1.block_sparse_moe.experts.0"


@pytest.mark.parametrize(
    ("family", "change", "entries"),
    [
        (dense(), _mix_heads, {}),
        (dense(), _neighbours, {}),
        (dense(), None, {"rope_theta": 10_000.0}),
        (dense(), None, {"rms_norm_eps": 1e-6}),
        (mixtral(), _swap(f"{MIXTRAL_EXPERT}.w1.weight", f"{MIXTRAL_EXPERT}.w3.weight"), {}),
        (deepseek(), None, {"rope_interleave": False}),
        (deepseek(), _key_first, {}),
        (deepseek(), _values_first, {}),
        (deepseek(), _swap(f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"), {}),
        (deepseek(), None, {"n_group": 1, "topk_group": 1}),
        (deepseek(), None, {"norm_topk_prob": False}),
        (deepseek(), None, {"routed_scaling_factor": 1.0}),
        (
            deepseek(),
            lambda tensors: tensors["model.layers.1.mlp.gate.e_score_correction_bias"].zero_(),
            {},
        ),
    ],
    ids=[
        *("head order", "rotary pairs", "theta", "eps", "gate and up", "interleaved", "key first"),
        *("values first", "expert gate and up", "groups", "normalise", "scaling", "bias"),
    ],
)
def test_a_wrong_layout_is_seen_in_the_logits(
    family: tuple[str, Any],
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    entries: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Each of these is what a wrong map would do; all of them have the right names and shapes."""
    model = build(family)
    write(tmp_path / "m", family, model)
    if change is not None:
        rewrite(tmp_path / "m", change)
    reconfigure(tmp_path / "m", **entries)
    with in_float64():
        assert distance(logits(model), logits(library_model(tmp_path / "m"))) > 1e-3


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.2.input_layernorm.weight"] = torch.ones(48)
        tensors["lm_head.weight"] = torch.ones(97, 24)
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    family = dense()
    model = build(family)
    rewrite(write(tmp_path / "m", family, model), change)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError) as caught:
        load_initial(model, tmp_path / "m")
    said = str(caught.value)
    assert "model.norm.weight is missing" in said
    assert "model.layers.2.input_layernorm.weight [48] is not known" in said
    assert "lm_head.weight is [97, 24], not [97, 48]" in said
    assert "model.layers.0.mlp.up_proj.weight holds I8, not one of F64, F32, BF16, F16" in said
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_follows_from_the_rest_may_be_there(tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def differ(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, 4] += 1

    family = dense(tie_embeddings=True)
    rewrite(write(tmp_path / "m", family, build(family)), add)
    assert load_initial(build(family, seed=9), tmp_path / "m") == []
    rewrite(tmp_path / "m", differ)
    with pytest.raises(ConfigError, match=r"lm_head.weight is not the same as model.embed"):
        load_initial(build(family), tmp_path / "m")


def test_a_bias_that_the_routers_would_not_have_is_refused(tmp_path: Path) -> None:
    family = deepseek()
    write(tmp_path / "m", family, build(family))
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    reconfigure(tmp_path / "m", paralign=raw["paralign"] | {"bias_update_speed": 0.0})
    with pytest.raises(ConfigError, match="e_score_correction_bias is not zero"):
        load_initial(build(deepseek(bias_update_speed=0.0)), tmp_path / "m")


def test_only_whole_folders_of_safetensors_are_read(tmp_path: Path) -> None:
    family = dense()
    folder = write(tmp_path / "m", family, build(family))
    file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    file.rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        PublishedWeights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle, which paralign"):
        PublishedWeights(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../m/x", "b": "gone.safetensors"}}))
    with pytest.raises(ConfigError) as caught:
        PublishedWeights(folder)
    assert "'../m/x' is not the name of a file in it" in str(caught.value)
    assert "gone.safetensors is not there" in str(caught.value)
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert load_initial(build(family), folder) == []
    index.write_text("{}")
    with pytest.raises(ConfigError, match="has no weight_map"):
        PublishedWeights(folder)
    file.write_bytes(b"x" * 100)
    with pytest.raises(TraceError, match="not a safetensors file"):
        PublishedWeights(folder)


def test_the_helpers_are_right_about_float64() -> None:
    """The library's float32 parts are what keeps a plain comparison from rounding errors."""
    before = torch.Tensor.float
    with in_float64():
        assert torch.ones(1).float().dtype == torch.float64
    assert torch.Tensor.float is before
    assert published.TOKENS.unique().numel() > 20
