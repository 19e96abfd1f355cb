"""Linear layers of many experts at once against one layer each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paralign.models.grouped_linear import grouped_linear

COUNTS = [3, 0, 5, 1, 0]


def inputs(bias: bool, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    return draw(sum(COUNTS), 4), draw(5, 6, 4), draw(5, 6) if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_goes_through_its_expert(bias, dtype):
    x, weight, biases = inputs(bias, dtype)
    out = grouped_linear(x, weight, biases, COUNTS)
    experts = torch.tensor(COUNTS).cumsum(0)
    for row in range(len(x)):
        expert = int((experts <= row).sum())
        layer = nn.Linear(4, 6, bias=bias, dtype=dtype)
        layer.weight.data = weight[expert].detach()
        if biases is not None:
            layer.bias.data = biases[expert].detach()
        torch.testing.assert_close(out[row], layer(x[row]))


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_match_finite_differences(bias):
    tensors = inputs(bias)
    given = [t for t in tensors if t is not None]

    def apply(*args: torch.Tensor) -> torch.Tensor:
        return grouped_linear(args[0], args[1], args[2] if bias else None, COUNTS)

    assert torch.autograd.gradcheck(apply, given)


def test_an_expert_without_rows_gets_a_zero_gradient():
    x, weight, biases = inputs(bias=True)
    grouped_linear(x, weight, biases, COUNTS).sum().backward()
    for parameter in (weight, biases):
        assert parameter.grad is not None
        assert [bool(parameter.grad[e].any()) for e in range(5)] == [True, False, True, True, False]


def test_no_rows_at_all_give_zero_gradients():
    _, weight, biases = inputs(bias=True)
    empty = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    out = grouped_linear(empty, weight, biases, [0] * 5)
    assert out.shape == (0, 6)
    out.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    assert biases is not None and biases.grad is not None and not biases.grad.any()
    assert empty.grad is not None


def test_a_frozen_weight_costs_no_gradient():
    x, weight, _ = inputs(bias=False)
    grouped_linear(x, weight.detach(), None, COUNTS).sum().backward()
    assert x.grad is not None and weight.grad is None
