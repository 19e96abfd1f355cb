"""Models by name: presets, hyper-parameters, rules and the errors they give."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from paralign.blueprint import Blueprint
from paralign.errors import ConfigError
from paralign.mesh import Degrees
from paralign.models.registry import MODELS, find_model

# Written out by hand from the sizes: embedding + layers * (...) + norm + head.
LLAMA_TINY_ATTENTION = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64  # with both norms
PANGU_TINY_ATTENTION = (
    (64 * 32 + 32 + 32 * 4 * 24)  # queries: down, norm, up
    + (64 * (24 + 8) + 24 + 24 * 4 * (16 + 16))  # keys and values, with the rotary key
    + 4 * 16 * 64
    + 2 * 64
)
TINY_ENDS = 2 * 256 * 64 + 64


def pangu_wide(hidden: int, nope: int, v: int, layers: int, experts: int, vocab: int) -> int:
    """Count a pangu_moe with 32 heads, biases and one dense layer."""
    attention = (
        (hidden * 768 + 768 + 768 + (768 + 1) * 32 * (nope + 64))
        + (hidden * 576 + 576 + 512 + (512 + 1) * 32 * (nope + v))
        + (32 * v * hidden + hidden)
        + 2 * hidden
    )

    def swiglu(inner: int) -> int:
        return 3 * hidden * inner + 2 * inner + hidden

    sparse = experts * hidden + experts * swiglu(512) + swiglu(1024)
    ends = vocab * hidden + hidden + (vocab * hidden + vocab)
    return ends + layers * attention + swiglu(6144) + (layers - 1) * sparse


COUNTS = {
    ("llama", "tiny"): TINY_ENDS + 4 * (LLAMA_TINY_ATTENTION + 3 * 64 * 128),
    ("llama", "mixtral_tiny"): TINY_ENDS
    + 4 * (LLAMA_TINY_ATTENTION + 8 * 64 + 8 * 3 * 64 * 64),  # a router, experts
    ("llama", "small"): 256 * 384
    + 8 * (2 * 384 * 384 + 2 * 384 * 192 + 3 * 384 * 1024 + 2 * 384)
    + 384
    + 256 * 384,
    ("llama", "1b"): 1_235_814_400,  # as published; embedding and head are one
    ("pangu_moe", "tiny_dense"): TINY_ENDS + 4 * (PANGU_TINY_ATTENTION + 3 * 64 * 128),
    ("pangu_moe", "tiny"): TINY_ENDS
    + 4 * PANGU_TINY_ATTENTION
    + 3 * 64 * 128
    + 3 * (8 * 64 + (8 + 1) * 3 * 64 * 32),  # a router, experts and the shared one
    ("pangu_moe", "demo"): pangu_wide(256, 64, 64, layers=2, experts=16, vocab=1000),
    ("pangu_moe", "full"): pangu_wide(2560, 128, 128, layers=45, experts=192, vocab=153_600),
}
PRESETS = [(entry.name, preset) for entry in MODELS.values() for preset in entry.presets]


def test_every_preset_has_a_count():
    assert sorted(COUNTS) == sorted(PRESETS)


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_builds_on_meta_with_the_expected_count(name, preset):
    entry = find_model(name)
    config = entry.configure(preset)
    with torch.device("meta"):
        model = entry.build(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name, preset]
    assert entry.problems(config, Degrees(), 64) == []
    assert isinstance(entry.blueprint(config), Blueprint)
    assert config.num_heads % config.num_kv_heads == 0


def test_importing_the_registry_imports_no_torch():
    code = "import sys, paralign.models.registry; print('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_hyper_parameter_can_be_set(name):
    entry = find_model(name)
    # Sizes of experts can be changed only where there are experts.
    preset = {"llama": "mixtral_tiny", "pangu_moe": "tiny"}[name]
    start = entry.configure(preset)
    needed: dict[str, dict[str, Any]] = {
        "num_expert_groups": {"num_limited_groups": 2},
        "num_limited_groups": {"num_expert_groups": 2},
        "router_score": {"router_normalise": "none"},
    }
    words = {"router_score": ["softmax", "sigmoid"], "router_normalise": ["none", "sum"]}
    for field in fields(entry.config_type):
        value = getattr(start, field.name)
        other: Any = not value if isinstance(value, bool) else None
        if other is None:
            texts = [text for text in words.get(field.name, []) if text != value]
            unset = 0.5 if field.name == "dropout" else 1
            other = texts[0] if texts else value * 2 or unset
        changed = entry.configure(preset, {**needed.get(field.name, {}), field.name: other})
        assert getattr(changed, field.name) == other != value
        with torch.device("meta"):
            entry.build(changed)


def test_the_default_preset_is_tiny():
    assert find_model("llama").configure() == find_model("llama").configure("tiny")


def test_an_unknown_model_suggests_the_nearest():
    with pytest.raises(ConfigError) as error:
        find_model("lama")
    assert str(error.value) == (
        "model name='lama' is not a model of paralign. Did you mean 'llama'? For a model of your "
        'own, give build and blueprint: {build: "my_pkg.model:build", blueprint: '
        '"my_pkg.model:blueprint"}.'
    )
    with pytest.raises(ConfigError, match=r"Use one of llama, pangu_moe\. For a model"):
        find_model("xyz")


def test_unknown_presets_and_hyper_parameters_are_listed_together():
    with pytest.raises(ConfigError) as error:
        find_model("llama").configure(
            "tinny",
            {"num_layer": 2, "hidden_size": "64", "bias": 1, "rope_theta": True, "num_heads": 2.0},
        )
    assert str(error.value) == (
        "model 'llama' cannot be configured:\n"
        "  - preset='tinny' is not a preset of model 'llama'. Did you mean 'tiny'?\n"
        "  - num_layer is not a hyper-parameter of model 'llama'. Did you mean 'num_layers'?\n"
        "  - hidden_size='64' must be a whole number\n"
        "  - bias=1 must be true or false\n"
        "  - rope_theta=True must be a number\n"
        "  - num_heads=2.0 must be a whole number"
    )


def test_a_whole_number_is_a_number():
    assert find_model("llama").configure("tiny", {"rope_theta": 500}).rope_theta == 500


def test_the_documentation_names_every_preset_and_hyper_parameter():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    for entry in MODELS.values():
        names = [*entry.presets, *(field.name for field in fields(entry.config_type))]
        assert [name for name in names if f"`{name}`" not in page] == []
    for (name, preset), count in COUNTS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        exact, millions = f"`{preset}` ({count:,})", f"`{preset}` ({count / 1e6:.1f} million)"
        assert exact in row or millions in row or f"`{preset}` ({count / 1e9:.2f} billion)" in row
