from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples.own_model import OwnBlueprint, build
from paralign.blueprint import Blueprint
from paralign.loss import shift_labels, token_cross_entropy_sum
from paralign.parallel.stage import Stage, boundary_tensors, meta_copy
from paralign.parallel.stages import split_layers
from paralign.train.build import build_pieces, init_rule, initialise_whole
from tests import parity
from tests.parity import make_config

ROWS, SEQ_LEN = 3, 8


def llama(**changes: Any) -> tuple[nn.Module, Blueprint]:
    config = make_config(model={**parity.BASE["model"], **changes})
    model, blueprint = build_pieces(config, torch.float64)
    return initialise_whole(model, init_rule(config, blueprint), seed=0), blueprint


def own() -> tuple[nn.Module, Blueprint]:
    torch.manual_seed(0)
    return build().double(), OwnBlueprint()


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(256, (ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQ_LEN).repeat(ROWS, 1)
    return {"tokens": tokens, "labels": shift_labels(tokens), "positions": positions}


def cut(model: nn.Module, blueprint: Blueprint, num_stages: int) -> list[Stage]:
    layers = len(list(model.get_submodule(blueprint.layers_name).children()))
    stages = [
        Stage(model, blueprint, layers=part, is_first=at == 0, is_last=at == num_stages - 1)
        for at, part in enumerate(split_layers(layers, num_stages))
    ]
    for stage in stages:
        stage.seq_len = SEQ_LEN
    return stages


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("make", [llama, own])
def test_stages_keep_global_names_and_the_parameters_themselves(make, num_stages):
    model, blueprint = make()
    stages = cut(model, blueprint, num_stages)
    named = [pair for stage in stages for pair in stage.named_parameters()]
    assert {name: id(p) for name, p in named} == {
        name: id(p) for name, p in model.named_parameters()
    }
    assert len(named) == len(list(model.named_parameters()))
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
    names = [name for stage in stages for name in stage.layer_names]
    assert names == [f"{blueprint.layers_name}.{index}" for index in range(4)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("make", [llama, own])
def test_stages_one_after_the_other_are_the_model(make, num_stages):
    model, blueprint = make()
    data = batch()
    expected = token_cross_entropy_sum(model(data["tokens"]), data["labels"])
    x = data["tokens"]
    for stage in cut(model, blueprint, num_stages):
        x = stage(x, **data)
    assert torch.equal(x, expected)


def test_what_is_sent_is_contiguous_and_no_view_in_both_directions():
    # The model computes in [S, B, hidden]: its embedding returns a transposed view.
    model, blueprint = own()
    first, second = cut(model, blueprint, 2)
    prologue = blueprint.prologue(first, batch(), None)
    assert prologue._is_view() and not prologue.is_contiguous()
    blueprint.layer = lambda layer, x, context: x.transpose(0, 1).transpose(0, 1)  # type: ignore[method-assign]
    sent = first(batch()["tokens"], **batch())
    assert sent.is_contiguous() and not sent._is_view()
    assert torch.equal(sent, prologue)

    received = sent.detach().requires_grad_()
    seen: list[Tensor] = []

    def backwards(layer: nn.Module, x: Tensor, context: Any) -> Tensor:
        x.register_hook(seen.append)
        return x

    blueprint.layer = backwards  # type: ignore[method-assign]
    blueprint.epilogue = (  # type: ignore[method-assign]
        lambda pieces, x, context: x.transpose(0, 1) @ torch.ones(64, 256).double()
    )
    second(received, **batch()).backward()
    assert received.grad is not None
    assert any(not grad.is_contiguous() for grad in seen)  # else this proves nothing
    assert received.grad.is_contiguous()


def test_an_output_that_can_be_sent_is_not_copied():
    model, blueprint = llama()
    first = cut(model, blueprint, 2)[0]
    made: list[Tensor] = []

    def keep(layer: nn.Module, x: Tensor, context: Any) -> Tensor:
        made.append(x * 2)
        return made[-1]

    blueprint.layer = keep  # type: ignore[method-assign]
    assert first(batch()["tokens"], **batch()) is made[-1]


class Loose(nn.Module):
    """A parameter that belongs to no module, and layers deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(2))
        self.trunk = nn.Module()
        self.trunk.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.trunk.last = nn.Module()
        self.trunk.last.scale = nn.Parameter(torch.ones(2))


def test_single_parameters_and_deep_names_are_taken_over():
    blueprint: Blueprint = OwnBlueprint()
    blueprint.prologue_names = ("start",)
    blueprint.layers_name = "trunk.blocks"
    blueprint.epilogue_names = ("trunk.last.scale",)
    first, last = (
        Stage(Loose(), blueprint, layers=[at], is_first=at == 0, is_last=at == 1) for at in range(2)
    )
    assert [n for n, _ in first.named_parameters()] == [
        "start",
        "trunk.blocks.0.weight",
        "trunk.blocks.0.bias",
    ]
    assert [n for n, _ in last.named_parameters()] == [
        "trunk.blocks.1.weight",
        "trunk.blocks.1.bias",
        "trunk.last.scale",
    ]
    with pytest.raises(RuntimeError, match="a namespace is never called"):
        first.get_submodule("trunk")()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_meta_copy_has_shapes_ties_and_flags_and_no_data(dtype):
    model, _ = llama(tie_embeddings=True)
    model.get_parameter("norm.weight").requires_grad_(False)
    model.register_buffer("counter", torch.zeros(3, dtype=torch.int64))
    skeleton = meta_copy(model, dtype)
    assert all(t.is_meta for t in [*skeleton.parameters(), *skeleton.buffers()])
    assert {n: (p.shape, p.requires_grad) for n, p in skeleton.named_parameters()} == {
        n: (p.shape, p.requires_grad) for n, p in model.named_parameters()
    }
    assert {p.dtype for p in skeleton.parameters()} == {dtype or torch.float64}
    assert skeleton.get_buffer("counter").dtype == torch.int64
    assert skeleton.get_parameter("head.weight") is skeleton.get_parameter("embedding.weight")
    assert not any(p.is_meta for p in model.parameters())  # the model stays as it was


@pytest.mark.parametrize("make", [llama, own])
def test_boundaries_found_without_data_are_what_stages_really_take_and_give(make):
    model, blueprint = make()
    stages = cut(model, blueprint, 3)
    found = boundary_tensors(
        meta_copy(model),
        blueprint,
        splits=split_layers(4, 3),
        rows=ROWS,
        local_seq=SEQ_LEN,
    )
    x = batch()["tokens"]
    for stage, (entry, out) in zip(stages, found, strict=True):
        assert (entry.shape, entry.dtype, entry.device.type) == (x.shape, x.dtype, "meta")
        assert entry.requires_grad is (not stage.is_first)
        x = stage(x, **batch())
        assert (out.shape, out.dtype, out.requires_grad) == (x.shape, x.dtype, True)
        assert out.is_contiguous() == x.is_contiguous()


def test_boundaries_have_the_compute_dtype_and_the_loss_keeps_its_own():
    model, blueprint = llama()
    found = boundary_tensors(
        meta_copy(model, torch.bfloat16),
        blueprint,
        splits=split_layers(4, 2),
        rows=2,
        local_seq=4,
    )
    assert [out.dtype for _, out in found] == [torch.bfloat16, torch.float32]
    assert [tuple(out.shape) for _, out in found] == [(2, 4, 32), ()]
