"""A user's own model: SBH inside, mask and transposes in forward, biases everywhere."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import paralign as pa
from examples import own_model
from paralign.config import load_config
from paralign.loss import count_valid_tokens, shift_labels, token_cross_entropy_sum
from paralign.models.compose import check_composition, structure_problems
from paralign.models.own import load_own_model
from paralign.parallel.data import Precision
from paralign.parallel.pipeline import Pipeline
from paralign.parallelize import Context, parallelize
from paralign.testing import run_on_ranks
from tests.models.helpers import batch, fill_everything, linear, rms_norm, swiglu

EXAMPLE = Path(own_model.__file__)
DEGREES = pa.Degrees(pp=2, dp_shard=2, cp=2)


def filled_model() -> nn.Module:
    model = own_model.build().double()
    fill_everything(model)
    return model


def formula(p: dict[str, Tensor], tokens: Tensor, num_layers: int, num_heads: int) -> Tensor:
    x = p["embedding.weight"][tokens]  # [B, S, hidden] throughout, unlike the example
    hidden = x.shape[-1]
    visible = torch.arange(tokens.shape[1])[:, None] >= torch.arange(tokens.shape[1])[None, :]
    for index in range(num_layers):
        at = f"blocks.{index}"
        h = rms_norm(x, p[f"{at}.norm1.weight"], 1e-5)
        q = linear(linear(h, p, f"{at}.attention.q_down"), p, f"{at}.attention.q_up")
        kv = linear(linear(h, p, f"{at}.attention.kv_down"), p, f"{at}.attention.kv_up")
        q, k, v = (
            part.unflatten(-1, (num_heads, -1)) for part in (q, kv[..., :hidden], kv[..., hidden:])
        )
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(hidden // num_heads)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2)
        x = x + linear(mixed, p, f"{at}.attention.out")
        x = x + swiglu(rms_norm(x, p[f"{at}.norm2.weight"], 1e-5), p, at)
    return linear(rms_norm(x, p["final_norm.weight"], 1e-5), p, "lm_head")


def test_model_matches_the_formula():
    model, tokens = filled_model(), batch()["tokens"]
    expected = formula(dict(model.named_parameters()), tokens, num_layers=4, num_heads=4)
    error = (model(tokens) - expected).norm() / expected.norm()
    assert error <= 100 * torch.finfo(expected.dtype).eps


def test_model_is_of_the_style_it_claims():
    model = filled_model()
    inputs: list[tuple[int, ...]] = []
    model.get_submodule("blocks.0").register_forward_pre_hook(
        lambda _, args: inputs.append(tuple(args[0].shape))
    )
    model(batch(rows=2, seq_len=16)["tokens"])
    assert inputs == [(16, 2, 64)]  # S, B, H
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    assert len(linears) == 4 * 8 and all(m.bias is not None for m in linears)


def test_blueprint_is_short():
    tree = ast.parse(EXAMPLE.read_text())
    cut = [n for n in tree.body if getattr(n, "name", "") in ("OwnBlueprint", "blueprint")]
    assert len(cut) == 2
    lines = [
        line
        for node in cut
        for line in EXAMPLE.read_text().splitlines()[node.lineno - 1 : node.end_lineno]
        if line.strip()
    ]
    assert len(lines) <= 30


def test_pieces_compose_bitwise_to_the_models_own_forward():
    model = filled_model()
    check_composition(model, own_model.blueprint(model), batch())


def test_the_mask_is_global_whatever_slice_the_rank_holds():
    blueprint = own_model.blueprint(filled_model())
    part = {name: tensor[:, 8:] for name, tensor in batch(seq_len=16).items()}
    assert torch.equal(blueprint.context(part, seq_len=16), torch.ones(16, 16).tril())


def test_config_names_the_example_and_every_argument_of_build(monkeypatch):
    monkeypatch.chdir(EXAMPLE.parent.parent)
    config = load_config(EXAMPLE.with_suffix(".yaml"))
    section = config.model
    assert section.build is not None and section.blueprint is not None
    model, blueprint = load_own_model(section.build, section.blueprint, section.hyper_parameters)
    assert type(model).__name__ == "OwnModel"
    assert structure_problems(model, blueprint) == []
    assert config.mesh.degrees == DEGREES
    assert set(section.hyper_parameters) == {"num_layers", "hidden_size", "num_heads", "rank"}


def gradients(model: nn.Module, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
    labels = shift_labels(tokens)
    loss = token_cross_entropy_sum(model(tokens), labels) / count_valid_tokens(labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def full(grad: Tensor | None) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.full_tensor()


def parallel_step(ulysses_degree: int | None) -> tuple[float, dict[str, Tensor]]:
    model = filled_model()
    program = parallelize(
        model,
        pa.build_mesh(DEGREES),
        blueprint=own_model.blueprint(model),
        pipeline=Pipeline(schedule="1F1B", num_microbatches=2),
        context=Context(ulysses_degree=ulysses_degree),
        precision=Precision(compute=torch.float64, reduce=torch.float64),
    )
    loss = program.step(program.shard({"tokens": batch(rows=8, seq_len=32)["tokens"]}))
    grads = {name: full(p.grad) for name, p in program.named_parameters()}
    return loss.item(), grads


@pytest.mark.ranks
@pytest.mark.parametrize("ulysses_degree", [None, 1])
def test_pipeline_fsdp_and_context_parallel_give_the_gradients_of_one_device(ulysses_degree):
    model = filled_model()
    loss, expected = gradients(model, batch(rows=8, seq_len=32)["tokens"])
    results = run_on_ranks(parallel_step, 8, ulysses_degree, describe=DEGREES.describe_rank)
    seen = set()
    for parallel_loss, grads in results:
        assert parallel_loss == pytest.approx(loss, rel=1e-14)
        for name, grad in grads.items():
            seen.add(name)
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error <= 100 * torch.finfo(torch.float64).eps, name
    assert seen == set(expected) == {name for name, _ in model.named_parameters()}
