from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paralign.config.load import resolve_config
from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.models.registry import MODELS
from tests.weights.published import deepseek, mixtral

SMALL = {"vocab_size": 256}


def published(folder: Path, family: tuple[str, Any]) -> str:
    folder.mkdir()
    raw = MODELS[family[0]].published.write(family[1])
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


def resolve(family: tuple[str, Any], source: str, **changes: Any) -> RunConfig:
    model = {"name": family[0], **vars(family[1]), "start_from": source, **changes}
    return resolve_config({"model": model, "train": {"dir": "nowhere/run"}})


def problems(family: tuple[str, Any], source: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(family, source, **changes)
    return str(caught.value)


def test_the_same_model_may_start(tmp_path: Path) -> None:
    family = mixtral(**SMALL)
    source = published(tmp_path / "m", family)
    assert resolve(family, source).model.start_from == source
    # None of these changes what is computed: no layer is dense, and the rest is of training.
    resolve(family, source, ffn_hidden_size=999, balance_loss=0.5, init_std=0.1)
    resolve(family, source, num_expert_groups=2, num_limited_groups=2)
    latent = deepseek(**SMALL)
    resolve(latent, published(tmp_path / "d", latent), bias_update_speed=0.5)


def test_what_tensors_do_not_show_is_compared(tmp_path: Path) -> None:
    family = mixtral(**SMALL)
    source = published(tmp_path / "m", family)
    said = problems(family, source, rope_theta=1e4, top_k=3, norm_eps=1e-5)
    for key, ours, theirs in (("rope_theta", "10000.0", "500.0"), ("top_k", "3", "2")):
        assert f"model.{key}={ours}, but model.start_from={source!r} has weights of a model" in said
        assert f"with {key}={theirs}. Set it to that." in said
    assert "model.norm_eps=1e-05" in said
    said = problems(deepseek(**SMALL), source)
    assert "has weights of a llama, and model.name=pangu_moe. Use name: llama." in said


def test_a_place_that_is_not_there_is_said_unless_the_run_goes_on(tmp_path: Path) -> None:
    family = mixtral(**SMALL)
    said = problems(family, str(tmp_path / "nothing"))
    assert "there is no such folder or file. Give the path of weights, or null." in said
    (tmp_path / "run" / "checkpoints" / "step-00000003").mkdir(parents=True)
    model = {"name": family[0], **vars(family[1]), "start_from": str(tmp_path / "nothing")}
    resolve_config({"model": model, "train": {"dir": str(tmp_path / "run")}})


def test_a_model_that_cannot_be_computed_is_said(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "gpt2"}')
    said = problems(mixtral(**SMALL), str(tmp_path / "m"))
    assert "model_type='gpt2' is no model that paralign has" in said


def test_a_model_of_somebodys_own_is_told_by_its_tensors(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "gpt2"}')
    own = {"build": "examples.own_model:build", "blueprint": "examples.own_model:OwnBlueprint"}
    raw = {"model": {**own, "start_from": str(tmp_path / "m")}}
    try:
        resolve_config(raw)
    except ConfigError as error:
        assert "start_from" not in str(error)
