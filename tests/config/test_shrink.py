from __future__ import annotations

import subprocess
import sys

import pytest

from paralign.config.load import resolve_config
from paralign.config.model_choice import choose_model
from paralign.config.shrink import shrink
from paralign.errors import ConfigError

LLAMA = {"name": "llama", "preset": "1b"}
MESH = {"pp": 8, "dp_shard": 4}


def small(world_size=4, **sections):
    raw = {"model": LLAMA, "mesh": MESH, "batch": {"global_batch": 1152, "seq_len": 512}}
    return shrink(resolve_config({**raw, **sections}), world_size)


@pytest.mark.parametrize(("num_layers", "expected"), [(16, 4), (17, 5), (8, 2), (9, 3)])
def test_layers_split_as_unevenly_as_before(num_layers, expected):
    config = small(
        model={**LLAMA, "num_layers": num_layers}, pipeline={"num_microbatches": 8}
    ).config
    assert choose_model(config.model).size("num_layers") == expected


def test_listed_layers_keep_their_differences_and_stages():
    layers = [1, 2, 3, 2, 2, 2, 2, 2]
    found = small(pipeline={"num_microbatches": 8, "layers_per_stage": layers}).config
    assert found.pipeline.layers_per_stage == (1, 2)
    assert choose_model(found.model).size("num_layers") == 3


@pytest.mark.parametrize(
    ("schedule", "num_microbatches", "expected"),
    [
        ("1F1B", 8, 2),  # as many as ranks
        ("1F1B", 9, 3),
        ("1F1B", 16, 4),
        ("GPipe", 4, None),  # fewer than ranks: with two, only one is, and one is no sequence
        ("GPipe", 1, 1),
        ("Interleaved1F1B", 32, 4),
        ("DualPipeV", 16, 4),
    ],
)
def test_micro_batches_fill_the_pipeline_as_before(schedule, num_microbatches, expected):
    pipeline = {"schedule": schedule, "num_microbatches": num_microbatches}
    found = small(pipeline=pipeline).config
    assert found.pipeline.schedule == schedule
    if expected is not None:
        assert found.pipeline.num_microbatches == expected
    else:
        assert found.pipeline.num_microbatches > 1


@pytest.mark.parametrize(("chunks", "divides"), [(1, True), (4, True), (3, False), (5, False)])
def test_chunks_of_the_loss_divide_as_before(chunks, divides):
    found = small(loss={"chunks": chunks}, pipeline={"num_microbatches": 8}).config
    assert (found.loss.chunks > 1) == (chunks > 1)
    assert (found.batch.seq_len % found.loss.chunks == 0) == divides


def test_what_is_no_size_stays():
    sections = {
        "pipeline": {"schedule": "LoopedBFS", "stages_per_rank": 2, "num_microbatches": 8},
        "recompute": {"parts": ["*_norm"]},
        "precision": {"compute": "bfloat16"},
        "optimizer": {"name": "sgd", "momentum": 0.5},
        "tensor": {"overlap": "chunks"},
        "data": {"padding": 0.25},
        "align": {"steps": 3},
        "fsdp": {"reshard_after_forward": True},
    }
    found = small(**sections)
    for name in ("recompute", "precision", "optimizer", "tensor", "data", "align", "fsdp"):
        assert name not in found.changes
    assert found.config.pipeline.schedule == "LoopedBFS"
    assert found.config.pipeline.stages_per_rank == 2
    assert choose_model(found.config.model).config.tie_embeddings


def test_units_lose_the_layers_that_are_gone():
    wrap = [["embedding", "layers.0"], ["layers.1", "layers.9"], ["layers.15"], ["norm"]]
    found = small(fsdp={"wrap": wrap}, pipeline={"num_microbatches": 8}).config
    assert found.fsdp.wrap == (("embedding", "layers.0"), ("layers.1",), ("norm",))


def test_names_of_frozen_parameters_lose_the_layers_that_are_gone():
    names = ["embedding.*", "layers.1.*", "layers.9.ffn.*", "layers.*.attention.*"]
    found = small(optimizer={"freeze": names}, pipeline={"num_microbatches": 8}).config
    assert found.optimizer.freeze == ("embedding.*", "layers.1.*", "layers.*.attention.*")


def test_dense_layers_come_first_and_experts_after_them():
    mesh = {"pp": 8, "dp_shard": 16, "cp": 4, "ep": 32}
    found = shrink(
        resolve_config(
            {
                "model": {"name": "pangu_moe", "preset": "full", "num_dense_layers": 3},
                "mesh": mesh,
                "pipeline": {"num_microbatches": 16},
                "batch": {"global_batch": 256, "seq_len": 4096},
            }
        )
    )
    sizes = choose_model(found.config.model).config
    assert (sizes.num_layers, sizes.num_dense_layers) == (5, 1)
    assert found.config.mesh.degrees.world_size == 8


def test_both_values_of_every_change_are_told():
    found = small(pipeline={"num_microbatches": 16})
    told = dict(found.lines())
    assert told["mesh"] == "pp 8 -> 2, dp_shard 4 -> 2"
    assert "num_heads 32 -> " in told["model"]
    assert "seq_len 512 -> 16" in told["batch"]
    assert found.lost == ()


def test_what_has_no_room_is_told():
    context = {"ulysses_degree": 2}
    mesh = {"pp": 2, "dp_replicate": 2, "cp": 4, "tp": 2}
    found = small(8, mesh=mesh, context=context)
    assert [text.split(":")[0] for text in found.lost] == [
        "axis dp_replicate (2 ranks)",
        "ulysses_degree=2 of cp=4, which swaps heads and gathers keys and values",
    ]


def test_sizes_of_the_users_own_model_stay_and_are_told(tmp_path, monkeypatch):
    (tmp_path / "own_small.py").write_text(
        "def build(num_layers=12, width=512): ...\ndef cut(model): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    found = small(
        model={"build": "own_small:build", "blueprint": "own_small:cut"},
        pipeline={"num_microbatches": 8},
        mesh={"pp": 4, "dp_shard": 4},
    )
    assert found.config.model.hyper_parameters == {"num_layers": 4}
    assert "sizes of your own model" in found.lost[0]


def test_a_world_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="--world=64 with --shrink"):
        small(64, pipeline={"num_microbatches": 8})


def test_a_tokenizer_gives_way_to_bytes(tmp_path):
    from tests.data.texts import write_tokenizer

    data = {"tokenizer": str(write_tokenizer(tmp_path / "t.json")), "end_token": "</s>"}
    model = {"name": "llama", "preset": "tiny", "vocab_size": 65536}
    data |= {"packing": "isolated"}
    small = shrink(resolve_config({"model": model, "data": data}))
    assert (small.config.data.tokenizer, small.config.data.end_token) == ("bytes", None)
    assert small.config.data.packing == "isolated"
    assert small.config.model.hyper_parameters["vocab_size"] < 4096
    assert small.changes["data"]["tokenizer"] == (data["tokenizer"], "bytes")


def test_torch_is_not_imported():
    code = (
        "import sys; from paralign.config import load_config, shrink\n"
        "shrink.shrink(load_config('examples/pangu_moe_full.yaml'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_weights_of_the_large_size_are_not_kept(tmp_path):
    (tmp_path / "w.safetensors").write_text("")
    source = str(tmp_path / "w.safetensors")
    found = small(model={**LLAMA, "start_from": source}, pipeline={"num_microbatches": 8})
    assert found.config.model.start_from is None
    assert any(source in text and "random ones" in text for text in found.lost)
