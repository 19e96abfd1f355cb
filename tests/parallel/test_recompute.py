"""Recomputing changes no bit, is done once, and keeps less; names that fit nothing are said."""

from __future__ import annotations

import copy
import gc
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paralign.errors import ConfigError, LayoutError, ScheduleError
from paralign.mesh import build_mesh
from paralign.models import blocked_experts
from paralign.models.experts import Experts
from paralign.models.llama.model import Llama
from paralign.models.llama.presets import LlamaConfig
from paralign.models.pangu_moe.model import PanguMoe
from paralign.models.pangu_moe.presets import tiny as pangu_tiny
from paralign.models.router import Router
from paralign.parallel import recompute as module
from paralign.parallel.recompute import (
    Recompute,
    apply_recompute,
    callables_of,
    recompute_problems,
)
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, numerics
from tests.memory import bytes_held
from tests.parity import PANGU, make_config

CHEAP = ("*_norm", "attention.project", "*.activate")
REPORTED = (*CHEAP, "ffn.experts.permute")
CHOICES: list[str | Sequence[str]] = [
    "block",
    ("*_norm",),
    ("attention.project",),
    ("attention.q_up", "attention.q_down", "attention.q_norm", "attention.w*"),  # one feeds another
    ("attention", "attention.core", "ffn"),  # one inside another
    ("ffn.router", "ffn.experts", "ffn.experts.activate", "ffn.down"),
    REPORTED,
]


def llama() -> nn.Module:
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=160,
            num_heads=4,
            num_kv_heads=2,
            vocab_size=256,
            bias=True,
        )
    ).double()


def pangu() -> nn.Module:
    torch.manual_seed(0)
    return PanguMoe(pangu_tiny()).double()


def with_recompute(model: nn.Module, parts: str | Sequence[str]) -> nn.Module:
    known = list(callables_of(model.get_submodule("layers.0")))
    if not isinstance(parts, str):  # those that this family has
        options = [Recompute((part,)) for part in parts]
        layers = list(model.get_submodule("layers").children())
        parts = [
            str(option.parts[0]) for option in options if not recompute_problems(layers, option)
        ]
        assert parts, known
    model = copy.deepcopy(model)
    for layer in model.get_submodule("layers").children():
        apply_recompute(layer, Recompute(parts))
    return model


def gradients(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    loss = model(tokens).square().sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("parts", CHOICES, ids=str)
@pytest.mark.parametrize("build", [llama, pangu])
def test_the_same_to_the_last_bit(build, parts):
    plain, tokens = build(), torch.arange(60).view(2, 30)
    again = with_recompute(plain, parts)
    loss, expected = gradients(plain, tokens)
    recomputed_loss, found = gradients(again, tokens)
    assert torch.equal(recomputed_loss, loss)
    assert len(found) == len(expected) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_is_made_wrongly_again_shows(monkeypatch):
    plain, tokens = llama(), torch.arange(60).view(2, 30)
    redeem = module._Promise.redeem
    monkeypatch.setattr(module._Promise, "redeem", lambda self: redeem(self) * (1 + 1e-9))
    _, expected = gradients(plain, tokens)
    _, found = gradients(with_recompute(plain, REPORTED), tokens)
    assert not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_less_is_kept():
    model, tokens = llama(), torch.arange(256).view(2, 128)
    choices = ("none", "block", ("*_norm",), ("ffn.activate",), REPORTED)
    models = {str(parts): with_recompute(model, parts) for parts in choices}
    kept = {parts: bytes_held(partial(one, tokens)) for parts, one in models.items()}
    none = kept.pop("none")
    hidden = 2 * 128 * 64 * 8
    # A norm keeps its input, which the residual keeps anyway, and saves output and inner values.
    assert none - kept["('*_norm',)"] >= 4 * hidden
    # The product that goes down, of every layer.
    assert none - kept["('ffn.activate',)"] >= 2 * hidden * 160 // 64
    assert kept[str(REPORTED)] < 0.7 * none
    assert kept["block"] < 0.25 * none


# Of one layer with experts, forward: rows of 16 and products of 24 features, for 3 choices.
NUM_TOKENS, WIDTH, INNER, NUM_CHOICES = 600, 16, 24, 3
ROWS = NUM_TOKENS * NUM_CHOICES * 8  # bytes of a feature


class OneOfExperts(nn.Module):
    """A layer of experts alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts(6, WIDTH, INNER, bias=True).double()

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.experts(x, indices, weights)
        return out


def held_by_experts(*parts: str) -> tuple[int, list[Tensor]]:
    """Return the bytes that one layer keeps for its backward pass, and all its gradients."""
    layer = apply_recompute(OneOfExperts(), Recompute(parts or "none"))
    x = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    scores = torch.rand(NUM_TOKENS, 6, dtype=torch.float64)
    weights, indices = scores.topk(NUM_CHOICES)
    inputs = (x, indices, weights.requires_grad_())
    num_bytes = bytes_held(partial(layer, *inputs))
    layer(*inputs).sin().sum().backward()
    grads = [tensor.grad for tensor in (x, weights, *layer.parameters())]
    return num_bytes, [grad for grad in grads if grad is not None]


def test_experts_keep_less():
    plain, expected = held_by_experts()
    assert len(expected) == 8
    saved = {}
    for parts in (("experts.permute",), ("experts.activate",), ("experts.permute", "*.activate")):
        num_bytes, found = held_by_experts(*parts)
        saved[parts[-1] if len(parts) == 1 else "both"] = plain - num_bytes
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), parts
    # Rows that two layers take in; what silu makes and the product that goes down. Random states of
    # five thousand bytes are kept instead.
    assert saved["experts.permute"] >= 0.9 * ROWS * WIDTH
    assert saved["experts.activate"] >= 0.9 * ROWS * 2 * INNER
    assert saved["both"] >= 0.9 * ROWS * (WIDTH + 2 * INNER)


def test_experts_in_blocks_keep_neither_in_any_case(monkeypatch):
    monkeypatch.setattr(blocked_experts, "MAPPED_BYTES", 0)
    plain, expected = held_by_experts()
    monkeypatch.setattr(module, "_Region", None)  # nothing is made again
    again, found = held_by_experts("experts.permute", "experts.activate")
    assert again == plain
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("parts", ["block", REPORTED], ids=str)
def test_nothing_outlives_the_backward_pass(parts):
    model, tokens = with_recompute(llama(), parts), torch.arange(60).view(2, 30)
    gradients(model, tokens)  # from now on gradients are added in place
    gc.collect()
    gc.disable()  # what only the collector of cycles frees stays for many micro-batches
    try:
        left = bytes_held(lambda: model(tokens).square().sum().backward())
    finally:
        gc.enable()
    assert left <= 0


@pytest.mark.parametrize("parts", ["block", REPORTED], ids=str)
def test_every_part_runs_twice_and_no_more(parts):
    model = llama()
    runs: Counter[str] = Counter()

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            runs[name] += 1
            return call(*args, **kwargs)

        return counted

    layer = model.get_submodule("layers.0")
    for name in ("attention_norm", "attention.project", "ffn.activate", "attention.core", "ffn"):
        owner, leaf = module._find(layer, name)
        setattr(owner, leaf, count(name, getattr(owner, leaf)))
    for each in model.get_submodule("layers").children():
        apply_recompute(each, Recompute(parts))
    gradients(model, torch.arange(60).view(2, 30))
    twice = {"attention_norm": 2, "attention.project": 2, "ffn.activate": 2}
    other = 2 if parts == "block" else 1  # what no part holds is not run again
    assert runs == {**twice, "attention.core": other, "ffn": other}


@pytest.mark.parametrize("parts", ["block", ("noisy",)], ids=str)
def test_random_numbers_are_drawn_again(parts):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def noisy(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5) ** 2

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(self.noisy(x))
            return out

    torch.manual_seed(0)
    plain = Layer()
    again = apply_recompute(copy.deepcopy(plain), Recompute(parts))
    results = []
    for layer in (plain, again):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(1)
        layer(x).sum().backward()
        results.append((x.grad, layer.get_parameter("linear.weight").grad))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_without_gradients_nothing_is_kept_and_nothing_breaks():
    model, tokens = llama(), torch.arange(60).view(2, 30)
    with torch.no_grad():
        expected = model(tokens)
        for parts in ("block", REPORTED):
            assert torch.equal(with_recompute(model, parts)(tokens), expected)


def test_names_that_fit_nothing():
    layers = [*llama().get_submodule("layers").children()]
    assert recompute_problems(layers, Recompute()) == []
    assert recompute_problems(layers, Recompute("block")) == []
    assert recompute_problems(layers, Recompute("blocks")) == [
        "recompute parts='blocks' is not known. Use 'none' or 'block', or a list of names."
    ]
    assert recompute_problems(layers, Recompute(("ffn.gat", "*_norm", "zzz"))) == [
        "recompute part 'ffn.gat' matches no module or method of a layer. Did you mean 'ffn.gate'?",
        "recompute part 'zzz' matches no module or method of a layer.",
    ]
    # A container is not called, and neither are methods of torch's own modules.
    assert not {"requires_grad_", "attention.wq.reset_parameters"} & {*callables_of(layers[0])}


def test_a_part_that_is_never_called():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    layer = apply_recompute(Layer(), Recompute(("spare",)))
    with pytest.raises(LayoutError, match="recompute parts spare were never called"):
        layer(torch.ones(2, 4, requires_grad=True))


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")


def on_and_off(mesh_degrees: dict[str, int], model: dict[str, Any], parts: Sequence[str]) -> None:
    """Compare every gradient of every schedule with and without recomputing; runs on every rank."""
    mesh = None
    for schedule in SCHEDULES:
        found = []
        for chosen in ("none", "block", parts):
            config = make_config(
                mesh=mesh_degrees,
                model={**model, "num_layers": 5},
                pipeline={"schedule": schedule, "num_microbatches": 2},
                recompute={"parts": chosen},
            )
            mesh = mesh or build_mesh(config.mesh.degrees)
            program = build_program(config, numerics("float64", config), mesh=mesh)
            loss = program.step(program.shard(build_data(config).global_batch(0)))
            grads = {name: p.grad for name, p in program.named_parameters()}
            found.append((loss, grads))
        for loss, grads in found[1:]:
            assert torch.equal(loss, found[0][0])
            for name, grad in grads.items():
                expected = found[0][1][name]
                assert isinstance(grad, DTensor) and isinstance(expected, DTensor)
                assert torch.equal(grad.to_local(), expected.to_local()), (schedule, name)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("degrees", "model"),
    [
        pytest.param({"pp": 2, "dp_shard": 2}, {}, marks=pytest.mark.long),
        pytest.param({"pp": 2, "tp": 2}, {}, marks=pytest.mark.long),
        ({"dp_shard": 2, "ep": 2}, {"name": "pangu_moe", "preset": "tiny"}),
        pytest.param({"pp": 2, "cp": 2}, dict(PANGU), marks=pytest.mark.long),
    ],
    ids=["fsdp", "tp", "ep", "cp-pangu"],
)
def test_on_ranks_the_same_to_the_last_bit(degrees, model):
    base = model or dict(make_config().model.hyper_parameters, name="llama")
    world_size = math.prod(d for axis, d in degrees.items() if axis != "ep")
    parts = REPORTED if degrees.get("ep") else CHEAP
    run_on_ranks(on_and_off, world_size, degrees, base, parts, timeout=200)


@pytest.mark.ranks
def test_refused_where_the_backward_pass_is_split():
    with pytest.raises(ScheduleError, match=r"recomputes each layer 4\.5 to 8 times a step"):
        run_on_ranks(_build_zero_bubble, 1)


@pytest.mark.ranks
def test_refused_where_no_layer_has_it():
    with pytest.raises(ConfigError, match="recompute part 'attn' matches no module or method"):
        run_on_ranks(_build_unknown, 1)


def _build_zero_bubble() -> None:
    config = make_config(mesh={"pp": 1})
    pipeline = config.pipeline.model_copy(update={"schedule": "ZBVZeroBubble"})
    recompute = config.recompute.model_copy(update={"parts": "block"})
    changed = config.model_copy(update={"pipeline": pipeline, "recompute": recompute})
    build_program(changed, numerics("float64", changed))


def _build_unknown() -> None:
    config = make_config(mesh={"pp": 1}, recompute={"parts": ["attn"]})
    build_program(config, numerics("float64", config))


def counts_of_routers(parts: str | Sequence[str]) -> dict[str, list[int]]:
    """Return the tokens that every router has counted in a step, on every rank its own."""
    config = make_config(
        mesh={"pp": 2},
        model={"name": "pangu_moe", "preset": "tiny"},
        pipeline={"schedule": "1F1B", "num_microbatches": 4},
        recompute={"parts": parts},
    )
    program = build_program(config, numerics("float64", config))
    program.step(program.shard(build_data(config).global_batch(0)))
    routers = {
        name: router
        for stage in program.modules
        for name, router in stage.named_modules()
        if isinstance(router, Router)
    }
    counts = {name: router.tally.take_counts() for name, router in routers.items()}
    return {name: count.tolist() for name, count in counts.items() if count is not None}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "parts", [("ffn", "*_norm"), pytest.param("block", marks=pytest.mark.long)], ids=str
)
def test_routers_count_a_token_once(parts):
    expected = run_on_ranks(counts_of_routers, 2, "none")
    assert [sum(map(sum, counts.values())) > 0 for counts in expected] == [True, True]
    assert run_on_ranks(counts_of_routers, 2, parts) == expected
