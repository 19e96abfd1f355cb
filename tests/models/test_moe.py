"""A block of experts against a formula written with einsum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paralign.loss import Predicted
from paralign.models.feed_forward import SwiGLU
from paralign.models.moe import MoE, feed_forward
from paralign.models.moe_sizes import MoeSizes
from tests.models.helpers import fill_everything, swiglu

SIZES = MoeSizes(
    num_experts=6,
    top_k=2,
    expert_hidden_size=5,
    shared_hidden_size=7,
    router_score="sigmoid",
    router_normalise="softmax",
    router_scaling=2.5,
)


def made(sizes: MoeSizes = SIZES, bias: bool = True):
    block = MoE(8, sizes, bias=bias).double()
    fill_everything(block)
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return block, x


def formula(block: MoE, x: torch.Tensor, sizes: MoeSizes) -> torch.Tensor:
    """Every expert computes every token; weights that were not selected are zero."""
    p = dict(block.named_parameters())
    scores = torch.sigmoid(torch.einsum("bsd,ed->bse", x, p["router.gate.weight"]))
    least = scores.sort(-1).values[..., -sizes.top_k, None]
    chosen = scores >= least
    raised = torch.exp(scores) * chosen
    weights = raised / raised.sum(-1, keepdim=True) * sizes.router_scaling
    gate = torch.einsum("bsd,efd->bsef", x, p["experts.gate"]) + p["experts.gate_bias"]
    up = torch.einsum("bsd,efd->bsef", x, p["experts.up"]) + p["experts.up_bias"]
    inner = gate / (1 + torch.exp(-gate)) * up
    out = torch.einsum("bsef,edf->bsed", inner, p["experts.down"]) + p["experts.down_bias"]
    return torch.einsum("bse,bsed->bsd", weights, out) + swiglu(x, p, "shared")


def test_the_block_matches_the_formula():
    block, x = made()
    torch.testing.assert_close(block(x), formula(block, x, SIZES), rtol=1e-12, atol=1e-13)


def test_without_a_shared_expert_there_is_none():
    block, x = made(replace(SIZES, shared_hidden_size=0))
    assert block.shared is None
    whole, _ = made()
    assert whole.shared is not None
    torch.testing.assert_close(block(x) + whole.shared(x), whole(x), rtol=1e-12, atol=1e-13)


def test_each_token_is_treated_alone():
    block, x = made()
    index = torch.tensor([4, 0, 3])
    torch.testing.assert_close(block(x[:, index]), block(x)[:, index], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("bias", [False, True])
def test_biases_are_on_every_expert_and_never_on_the_router(bias):
    block, _ = made(bias=bias)
    names = {name for name, _ in block.named_parameters() if name.endswith("bias")}
    assert names == (
        {"experts.gate_bias", "experts.up_bias", "experts.down_bias"}
        | {"shared.gate.bias", "shared.up.bias", "shared.down.bias"}
        if bias
        else set()
    )


def test_a_layer_with_or_without_experts_is_called_alike():
    block, x = made()
    predicted = Predicted(torch.ones(2, 5, dtype=torch.bool), 10)
    assert torch.equal(feed_forward(block, x, predicted), block(x))
    assert block.router.tally.counts is not None
    dense = SwiGLU(8, 5, bias=True).double()
    assert torch.equal(feed_forward(dense, x, predicted), dense(x))
