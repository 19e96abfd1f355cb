"""Linear layers of many experts at once against one layer each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paralign.models.grouped_linear import choose_form, grouped_linear

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


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 5, 1, 0], [0, 0, 9, 0, 0]])
def test_torchs_grouped_form_gives_what_the_loop_gives(bias, counts):
    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 8), (5, 12, 8), (5, 12)][: 3 if bias else 2]
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    grads: dict[str, list[Any]] = {}
    for dtype, form in ((torch.float32, "grouped"), (torch.float64, "loop")):
        tensors = [t.clone().to(dtype).requires_grad_() for t in made]
        assert choose_form(tensors[0], tensors[1]) == form
        out = grouped_linear(tensors[0], tensors[1], tensors[2] if bias else None, counts)
        out.sum().backward()  # an expanded gradient
        grads[form] = [out, *(t.grad for t in tensors)]
    for grouped, loop in zip(grads["grouped"], grads["loop"], strict=True):
        torch.testing.assert_close(grouped, loop.float(), rtol=1e-5, atol=1e-6)


def test_rows_that_the_grouped_form_cannot_take_go_through_the_loop():
    weight = torch.zeros(5, 6, 4)
    assert choose_form(torch.zeros(9, 4), weight) == "loop"  # 6 features: 24 bytes
    assert choose_form(torch.zeros(0, 4), torch.zeros(5, 8, 4)) == "loop"
    assert choose_form(torch.zeros(9, 4).bfloat16(), torch.zeros(5, 8, 4)) == "loop"
