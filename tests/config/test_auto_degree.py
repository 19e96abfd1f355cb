from __future__ import annotations

from typing import Any

import pytest

from paralign.config.load import load_config, resolve_config
from paralign.errors import ConfigError


def config(**mesh: Any) -> dict[str, Any]:
    return {
        "model": {"name": "llama", "num_layers": 4},
        "mesh": {"dp_shard": "auto", **mesh},
        "pipeline": {"num_microbatches": 2},
        "batch": {"global_batch": 48, "seq_len": 16},
    }


@pytest.mark.parametrize(
    ("world_size", "mesh", "degree"),
    [
        (8, {"pp": 2}, 4),
        (4, {"pp": 2}, 2),
        (2, {"pp": 2}, 1),
        (6, {}, 6),
        (8, {"cp": 2, "tp": 2}, 2),
    ],
)
def test_it_is_what_the_other_axes_leave(world_size, mesh, degree):
    found = resolve_config(config(**mesh), world_size=world_size).mesh
    assert found.dp_shard == degree
    assert found.degrees.world_size == world_size


def test_ep_takes_no_ranks_of_its_own():
    raw = config(tp=2, ep=4) | {"model": {"name": "llama", "preset": "mixtral_tiny"}}
    assert resolve_config(raw, world_size=8).mesh.dp_shard == 4


def test_an_override_says_it_too(tmp_path):
    (tmp_path / "RUN.yaml").write_text("model: {name: llama}\nmesh: {pp: 2}\n")
    path, words = tmp_path / "RUN.yaml", ["mesh.dp_shard=auto"]
    assert load_config(path, words, world_size=4).mesh.dp_shard == 2


@pytest.mark.parametrize(
    ("raw", "world_size", "told"),
    [
        (config(pp=2), 7, r"7 ranks are no multiple of pp=2 .*Start a multiple of 2 ranks"),
        (config(pp=2, cp=2), 2, r"2 ranks are no multiple of pp=2 .* cp=2"),
        (config(pp=2), None, r"torchrun has started none. Give a number.*mesh.dp_shard=2"),
        (config(pp="two"), 8, r"mesh.pp='two'"),
        (config() | {"batch": {"global_batch": 45, "seq_len": 16}}, 8, r"global_batch=45"),
        (config() | {"mesh": {"cp": "auto"}}, 8, r"mesh.cp='auto'"),
    ],
)
def test_what_does_not_fit_is_told_once(raw, world_size, told):
    with pytest.raises(ConfigError, match=told) as caught:
        resolve_config(raw, world_size=world_size)
    assert str(caught.value).count("\n") == 0
