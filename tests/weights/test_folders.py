from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paralign.errors import ConfigError, TraceError
from paralign.models.registry import MODELS
from paralign.weights.folders import describe, find_place, read_published


def fill(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def state(**model: Any) -> str:
    return json.dumps({"config": {"model": {"name": None, "preset": None, **model}}})


def test_a_place_is_told_by_what_lies_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    old = fill(run / "checkpoints" / "step-00000009", state_json=state(name="llama"))
    new = fill(run / "checkpoints" / "step-00000010", state_json=state(name="llama"))
    fill(run / "checkpoints" / ".step-00000011.partial", state_json="")
    for source, path in ((run, new), (run / "checkpoints", new), (old, old)):
        place = find_place(source)
        assert (place.kind, place.path) == ("checkpoint", path)
    published = find_place(fill(tmp_path / "m", config_json="{}"))
    assert published.kind == "published"
    assert find_place(fill(tmp_path / "t")).kind == "trace"
    (tmp_path / "w").write_text("")
    assert find_place(str(tmp_path / "w")).kind == "file"
    assert describe(find_place(tmp_path / "w")) is None
    with pytest.raises(TraceError, match="there is no such folder or file"):
        find_place(tmp_path / "nothing")


def test_a_checkpoint_names_its_model(tmp_path: Path) -> None:
    def of(name: str, text: str) -> Any:
        return describe(find_place(fill(tmp_path / name, state_json=text)))

    found = of("ours", state(name="llama", preset="mixtral_tiny", num_layers=2, start_from="x"))
    assert found.entry.name == "llama"
    assert (found.config.num_layers, found.config.num_experts) == (2, 8)
    assert of("own", state(build="a:b", blueprint="a:c", width=3)) is None
    with pytest.raises(ConfigError, match="does not name its model"):
        of("nothing", "{}")
    with pytest.raises(ConfigError, match="is not a model of paralign"):
        of("later", state(name="quux"))
    with pytest.raises(ConfigError, match="is no JSON"):
        of("text", "{")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        of("list", "[]")


def test_a_published_model_is_one_that_can_be_computed(tmp_path: Path) -> None:
    entry = MODELS["llama"]
    raw = entry.published.write(entry.presets["tiny"]())
    found = read_published(fill(tmp_path / "m", config_json=json.dumps(raw)))
    assert found.config == entry.presets["tiny"]()
    with pytest.raises(ConfigError) as caught:
        read_published(fill(tmp_path / "g", config_json='{"model_type": "gpt2"}'))
    assert "model_type='gpt2' is no model that paralign has" in str(caught.value)
    assert "It reads llama, mixtral, deepseek_v3" in str(caught.value)
    wrong = raw | {"num_attention_heads": 3, "head_dim": 21}
    with pytest.raises(ConfigError, match="hidden_size=64 must be a multiple of num_heads=3"):
        read_published(fill(tmp_path / "w", config_json=json.dumps(wrong)))
