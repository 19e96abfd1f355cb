from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import paralign as pa
from paralign.config.run import BatchSection, ModelSection, RunConfig
from paralign.errors import ConfigError, TrainingError
from paralign.models.registry import MODELS
from paralign.train import published
from paralign.train.checkpoint import FORMAT, seal_of
from paralign.train.published import export_checkpoint, import_published
from paralign.train.seed import seed_state
from paralign.train.tensor_files import write_tensors
from paralign.weights.translate import Translated
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
    tensors_of,
    write,
)

FAMILIES = {
    "llama": dense(),
    "llama_tied": dense(tie_embeddings=True),
    "mixtral": mixtral(num_kv_heads=3),
    "deepseek": deepseek(),
    "deepseek_tied": deepseek(tie_embeddings=True, bias_update_speed=0.0),
    "deepseek_dense": deepseek_dense(),
}


def checkpoint(
    folder: Path, family: tuple[str, Any], *, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of one rank, as the helpers know it, and return its tensors."""
    name, config = family
    tensors = {n: t.to(dtype) for n, t in tensors_of(build(family)).items()}
    path = folder / "checkpoints" / "step-00000007"
    path.mkdir(parents=True)
    files = set(write_tensors(path, tensors.items()).values())
    config = RunConfig(
        model=ModelSection.model_validate({"name": name, **vars(config)}),
        batch=BatchSection(seq_len=24),
    )
    state = {**seed_state(config), "format": FORMAT, "step": 7}
    state["files"] = {file: seal_of(path / file) for file in files}
    (path / "state.json").write_text(json.dumps(state))
    return tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back_not_a_bit_changes(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tensors = checkpoint(tmp_path / "run", family)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    config = import_published(tmp_path / "out", tmp_path / "seed")
    assert config.model.start_from == str(tmp_path / "seed")
    assert MODELS[family[0]].configure(None, config.model.hyper_parameters) == family[1]
    [path] = (tmp_path / "seed" / "step-00000000").glob("*.safetensors")
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    # What was imported can be exported, and is the same to the last byte.
    export_checkpoint(tmp_path / "seed", tmp_path / "again")
    pair = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "again")]
    assert pair[0] == pair[1]
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["torch_dtype"], raw["max_position_embeddings"]) == ("float32", 24)


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "deepseek"])
def test_the_library_reads_an_export_in_many_files(name: str, tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", FAMILIES[name], dtype=torch.float64)
    export_checkpoint(tmp_path / "run", tmp_path / "out", file_bytes=30_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {path.name: path for path in (tmp_path / "out").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == set(files)
    assert len(files) > 3
    data = sum(t.numel() * 8 for path in files.values() for t in load_file(path).values())
    assert index["metadata"]["total_size"] == data
    with in_float64():
        library = library_model(tmp_path / "out")
        assert distance(logits(build(FAMILIES[name])), logits(library)) < 1e-14


def test_another_dtype_rounds_all_but_router_biases(tmp_path: Path) -> None:
    tensors = checkpoint(tmp_path / "run", deepseek())
    said = export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.bfloat16)
    assert said == "DeepseekV3ForCausalLM, step 7, 91 tensors, bfloat16"
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["model.norm.weight"], tensors["norm.weight"].bfloat16())
    bias = found["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, tensors["layers.1.ffn.router.bias"])
    assert {t.dtype for n, t in found.items() if "correction" not in n} == {torch.bfloat16}
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["torch_dtype"] == "bfloat16"
    model = build(deepseek(), seed=9).float()
    assert pa.load_initial(model, tmp_path / "out") == []
    rounded = tensors["norm.weight"].bfloat16().float()
    assert torch.equal(model.get_parameter("norm.weight"), rounded)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        (dense(bias=True), ["bias=true"]),
        (
            mixtral(
                bias=True,
                router_score="sigmoid",
                router_normalise="softmax",
                router_scaling=2.0,
                shared_hidden_size=16,
                num_dense_layers=1,
                bias_update_speed=0.1,
                num_expert_groups=2,
            ),
            [
                *("bias=true", "router_score='sigmoid'", "router_normalise='softmax'"),
                *("router_scaling=2.0", "shared_hidden_size=16", "num_dense_layers=1"),
                *("bias_update_speed=0.1", "num_limited_groups=1 of num_expert_groups=2"),
            ],
        ),
        (
            deepseek(
                bias=True,
                norm_eps=1e-5,
                router_score="softmax",
                shared_hidden_size=30,
                num_expert_groups=8,
                num_limited_groups=4,
            ),
            [
                *("bias=true", "norm_eps=1e-05", "router_score='softmax'"),
                *("shared_hidden_size=30", "num_expert_groups=8 of num_experts=8"),
            ],
        ),
        (
            deepseek(router_normalise="softmax", shared_hidden_size=0),
            ["router_normalise='softmax'"],
        ),
    ],
    ids=["llama", "mixtral", "deepseek", "deepseek-softmax"],
)
def test_what_the_published_form_cannot_say_is_refused(
    family: tuple[str, Any], said: list[str], tmp_path: Path
) -> None:
    checkpoint(tmp_path / "run", family)
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert [text for text in said if text not in str(caught.value)] == []
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path) -> None:
    published = write(tmp_path / "m", dense(), build(dense()))
    with pytest.raises(ConfigError, match=r"m is no checkpoint\. Give a folder"):
        export_checkpoint(published, tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no such folder"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "out")
    checkpoint(tmp_path / "run", dense())
    with pytest.raises(ConfigError, match=r"run has no config\.json"):
        import_published(tmp_path / "run", tmp_path / "out")
    path = tmp_path / "run" / "checkpoints" / "step-00000007"
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"] = {"build": "a:b", "blueprint": "a:c", "name": None}
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="of a model of your own"):
        export_checkpoint(path, tmp_path / "out")


def test_a_damaged_or_wrong_checkpoint_is_not_exported(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", dense())
    path = tmp_path / "run" / "checkpoints" / "step-00000007"
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"]["num_layers"] = 3
    state["config"]["model"]["vocab_size"] = 98
    (path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(path, tmp_path / "out")
    assert "layers.2.attention.wq.weight is not in it" in str(caught.value)
    assert "embedding.weight is [97, 48], not [98, 48]" in str(caught.value)
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(TrainingError, match="has changed since it was written"):
        export_checkpoint(path, tmp_path / "out")


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    checkpoint(tmp_path / "run", dense())
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(published, "write_durably", full)
    with pytest.raises(ConfigError, match="cannot be written: no space left on device"):
        export_checkpoint(tmp_path / "run", tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_only_one_tensor_is_held(tmp_path: Path, monkeypatch: Any) -> None:
    """What has been written is let go of before the next tensor is read."""
    import weakref

    checkpoint(tmp_path / "run", mixtral())
    alive: list[Any] = []
    most = 0
    read = Translated.read

    def counted(self: Any, name: str, box: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        tensor = read(self, name, box)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(Translated, "read", counted)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert len(alive) > 20
    assert most <= 1
