"""Models by name: presets, hyper-parameters, rules and the errors they give."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from paralign.blueprint import Blueprint
from paralign.errors import ConfigError
from paralign.mesh import Degrees
from paralign.models.registry import MODELS, find_model

# Written out by hand from the sizes: embedding + layers * (...) + norm + head.
COUNTS = {
    ("llama", "tiny"): 256 * 64
    + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    + 64
    + 256 * 64,
    ("llama", "small"): 256 * 384
    + 8 * (2 * 384 * 384 + 2 * 384 * 192 + 3 * 384 * 1024 + 2 * 384)
    + 384
    + 256 * 384,
    ("llama", "1b"): 1_235_814_400,  # as published; embedding and head are one
    ("pangu_moe", "tiny"): 256 * 64
    + 4
    * (
        (64 * 32 + 32 + 32 * 4 * 24)  # queries: down, norm, up
        + (64 * (24 + 8) + 24 + 24 * 4 * (16 + 16))  # keys and values, with the rotary key
        + 4 * 16 * 64
        + 3 * 64 * 128
        + 2 * 64
    )
    + 64
    + 256 * 64,
    ("pangu_moe", "demo"): 1000 * 256
    + 4
    * (
        (256 * 768 + 768 + 768 + 768 * 2048 + 2048)
        + (256 * 544 + 544 + 512 + 512 * 32 * 96 + 32 * 96)
        + (2048 * 256 + 256)
        + (3 * 256 * 6144 + 2 * 6144 + 256)
        + 2 * 256
    )
    + 256
    + (1000 * 256 + 1000),
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
    start = entry.configure("tiny")
    for field in fields(entry.config_type):
        value = getattr(start, field.name)
        other = not value if isinstance(value, bool) else value * 2
        changed = entry.configure("tiny", {field.name: other})
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
