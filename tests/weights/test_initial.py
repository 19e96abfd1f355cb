from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from paralign.align import record
from paralign.errors import ConfigError, TraceError
from paralign.testing import run_on_ranks
from paralign.weights.initial import load_initial
from tests.align.toys import Toy, build, train
from tests.train.test_published import checkpoint
from tests.weights import published
from tests.weights.published import mixtral

CPU = torch.device("cpu")


def other() -> Toy:
    """The toy with other values."""
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    return model


def recorded(folder: Path) -> Path:
    model = build()
    with record(folder, model, steps=2):
        train(model, 2)
    return folder


def same(model: nn.Module) -> bool:
    expected = dict(build().named_parameters())
    return all(torch.equal(p, expected[n].to(p.dtype)) for n, p in model.named_parameters())


def test_weights_come_from_before_the_first_step(tmp_path: Path) -> None:
    model = other()
    assert load_initial(model, recorded(tmp_path / "t")) == []
    assert same(model)


def test_weights_come_from_a_file(tmp_path: Path) -> None:
    tensors = {n: p.detach().clone() for n, p in build().named_parameters()}
    save_file({**tensors, "extra": torch.ones(2)}, tmp_path / "w.safetensors")
    model = other().to(torch.bfloat16)
    assert load_initial(model, tmp_path / "w.safetensors") == ["extra"]
    assert same(model)
    # Under other names, and a tied parameter under its second one.
    renamed = {f"model.{n}": t for n, t in tensors.items()}
    renamed["model.head.weight"] = renamed.pop("model.embed.weight")
    save_file(renamed, tmp_path / "w2.safetensors")
    model = other()
    assert load_initial(model, tmp_path / "w2.safetensors", names={"*": "model.*"}) == []
    assert same(model)


def test_all_problems_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    tensors = {n: p.detach().clone() for n, p in build().named_parameters()}
    tensors["norm.weight"] = torch.ones(3)
    tensors["model.layers.0.weight"] = tensors.pop("layers.0.weight")
    save_file(tensors, tmp_path / "w.safetensors")
    model = other()
    with pytest.raises(ConfigError) as caught:
        load_initial(model, tmp_path / "w.safetensors")
    said = str(caught.value)
    assert "'layers.0.weight' is not in it. Say names=, it has 'model.layers.0.weight'" in said
    assert "'norm.weight' has the shape [8] in the model, but [3] there" in said
    assert torch.equal(model.norm.weight, other().norm.weight)


def test_what_holds_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(TraceError, match="not a safetensors file"):
        load_initial(build(), tmp_path / "w.safetensors")
    with pytest.raises(TraceError, match="there is no such folder"):
        load_initial(build(), tmp_path / "nothing")
    model = build()
    with record(tmp_path / "t", model, what=("grads",)):
        train(model, 1)
    with pytest.raises(TraceError, match="it has no initial parameters"):
        load_initial(build(), tmp_path / "t")


def load_sharded(folder: str, kind: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = other()
    del model.unused
    if kind == "fsdp2":
        fully_shard(model.layers[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model.layers[0].bias.requires_grad_(True)
        model = FullyShardedDataParallel(model, use_orig_params=kind == "originals", device_id=CPU)
    assert load_initial(model, folder, mesh=mesh) == ["unused"]
    if kind == "fsdp2":
        found = {n: p.full_tensor() for n, p in model.named_parameters()}
    else:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {
                n.replace("_fsdp_wrapped_module.", ""): p.clone()
                for n, p in model.named_parameters()
            }
    expected = dict(build().named_parameters())
    assert dist.get_world_size() == 2
    return [torch.equal(tensor, expected[name]) for name, tensor in found.items()]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["fsdp2", "originals", "flat"])
def test_sharded_models_are_filled(tmp_path: Path, kind: str) -> None:
    recorded(tmp_path / "t")
    for found in run_on_ranks(load_sharded, 2, str(tmp_path / "t"), kind):
        assert found == [True] * 7


class Counting(nn.Module):
    """A parameter, a buffer that is stored, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("tables", torch.zeros(4), persistent=False)


class Wrapper(nn.Module):
    """Holds a model as DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_buffers_are_filled_where_they_are_stored(tmp_path: Path) -> None:
    stored = {"inner.weight": torch.ones(3), "inner.mean": torch.tensor([2.0, 3.0])}
    save_file(stored, tmp_path / "w.safetensors")
    model = Wrapper(nn.ModuleDict({"inner": Counting()}))
    assert load_initial(model, tmp_path / "w.safetensors") == []
    found = dict(model.named_buffers())
    assert found["module.inner.mean"].tolist() == [2.0, 3.0]
    assert found["module.inner.tables"].tolist() == [0.0] * 4
    save_file({**stored, "inner.mean": torch.ones(5)}, tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"'inner.mean' has the shape \[2\] in the model, but"):
        load_initial(model, tmp_path / "w.safetensors")


def test_weights_come_from_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    family = mixtral()
    tensors = checkpoint(tmp_path / "run", family)
    model = published.build(family, seed=9)
    assert load_initial(model, tmp_path / "run") == []
    found = published.tensors_of(model)
    assert all(torch.equal(found[name], tensor.double()) for name, tensor in tensors.items())
