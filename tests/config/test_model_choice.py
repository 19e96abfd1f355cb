from __future__ import annotations

import pytest

from paralign.config.model_choice import build_model, choose_model
from paralign.config.run import ModelSection
from paralign.errors import ConfigError

OWN = """
from torch import nn
from paralign.blueprint import Blueprint

def build(num_layers, num_heads=2, width=4):
    return nn.Linear(width, num_layers)

class Cut(Blueprint):
    def context(self, batch, *, seq_len): return None
    def prologue(self, pieces, batch, context): return batch["tokens"]
    def layer(self, layer, x, context): return layer(x)
    def epilogue(self, pieces, x, context): return x
"""


def section(**keys: object) -> ModelSection:
    return ModelSection.model_validate(keys)


def test_hyper_parameters_change_a_preset():
    choice = choose_model(section(name="llama", preset="tiny", num_layers=7, rope_theta=5))
    assert choice.problems == ()
    assert (choice.config.num_layers, choice.config.rope_theta) == (7, 5)
    assert choice.size("num_layers") == 7
    assert choice.size("rope_theta") == 5
    assert choice.size("no_such") is None


def test_size_knows_properties_and_skips_booleans():
    choice = choose_model(section(name="pangu_moe", bias=True))
    assert choice.size("num_kv_heads") == choice.config.num_heads
    assert choice.size("bias") is None


def test_a_registered_model_is_built():
    module, blueprint = build_model(section(name="llama", num_layers=2))
    assert len(module.get_submodule(blueprint.layers_name)) == 2  # type: ignore[arg-type]


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_choice.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "own_choice"


def test_own_model_is_built_with_its_arguments(own_module):
    chosen = section(build=f"{own_module}:build", blueprint=f"{own_module}:Cut", num_layers=3)
    module, blueprint = build_model(chosen)
    assert module.weight.shape == (3, 4)
    assert type(blueprint).__name__ == "Cut"


def test_sizes_of_an_own_model_come_from_its_source(own_module):
    choice = choose_model(
        section(build=f"{own_module}:build", blueprint=f"{own_module}:Cut", num_layers=3)
    )
    assert choice.problems == ()
    assert (choice.size("num_layers"), choice.size("num_heads")) == (3, 2)


def test_arguments_of_an_own_model_are_checked(own_module):
    chosen = section(build=f"{own_module}:build", blueprint=f"{own_module}:Cut", wdith=3)
    assert choose_model(chosen).problems == (
        "model.wdith: own_choice:build has no such hyper-parameter. Did you mean model.width?",
        "model.num_layers is missing: own_choice:build needs it. "
        "Write `num_layers: ...` below model.",
    )
    with pytest.raises(ConfigError, match="wdith"):
        build_model(chosen)
