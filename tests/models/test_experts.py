"""A stack of experts against each token's experts, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paralign.models.experts import NOT_HERE, Experts
from tests.models.helpers import fill_everything

T, D, E, K = 7, 6, 4, 2


def made(bias: bool = True):
    experts = Experts(E, D, 5, bias=bias).double()
    fill_everything(experts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=generator, dtype=torch.float64).requires_grad_()
    # Expert 2 is chosen by nobody.
    indices = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 3], [1, 0], [3, 1], [0, 1]])
    weights = torch.rand(T, K, generator=generator, dtype=torch.float64).requires_grad_()
    return experts, x, indices, weights


def one_by_one(experts: Experts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for t in range(len(x)):
        total = torch.zeros(D, dtype=torch.float64)
        for k, e in enumerate(indices[t].tolist()):
            if e == NOT_HERE:
                continue
            gate, up = experts.gate[e] @ x[t], experts.up[e] @ x[t]
            if experts.gate_bias is not None and experts.up_bias is not None:
                gate, up = gate + experts.gate_bias[e], up + experts.up_bias[e]
            out = experts.down[e] @ (gate / (1 + torch.exp(-gate)) * up)
            out = out if experts.down_bias is None else out + experts.down_bias[e]
            total = total + weights[t, k] * out
        rows.append(total)
    return torch.stack(rows)


def gradients(function, experts, x, indices, weights):
    for tensor in (x, weights, *experts.parameters()):
        tensor.grad = None
    out = function(experts, x, indices, weights) if function else experts(x, indices, weights)
    out.sin().sum().backward()
    found = {"x": x.grad, "weights": weights.grad}
    return out, found | {name: p.grad for name, p in experts.named_parameters()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_outputs_and_gradients_are_those_of_each_expert_alone(bias, missing):
    experts, x, indices, weights = made(bias)
    if missing:
        indices = indices.clone()
        indices[0, 1] = indices[4, 0] = indices[5, 0] = indices[5, 1] = NOT_HERE
    expected, expected_grads = gradients(one_by_one, experts, x, indices, weights)
    out, grads = gradients(None, experts, x, indices, weights)
    torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-15)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-12, atol=1e-14)


def test_an_expert_that_nobody_chose_has_a_zero_gradient():
    experts, x, indices, weights = made()
    experts(x, indices, weights).sum().backward()
    for name, parameter in experts.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad[2].any() and parameter.grad[0].any(), name


@pytest.mark.parametrize("tokens", ["none", "all elsewhere"])
def test_without_a_token_every_gradient_is_zero(tokens):
    experts, x, indices, weights = made()
    if tokens == "none":
        x, indices, weights = (tensor.detach()[:0] for tensor in (x, indices, weights))
    else:
        indices = torch.full_like(indices, NOT_HERE)
    out = experts(x, indices, weights)
    assert out.shape == x.shape and not out.any()
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_the_sum_is_made_in_the_dtype_of_the_weights():
    experts, x, indices, weights = made()
    low = experts.to(torch.bfloat16)
    out = low(x.detach().bfloat16(), indices, weights.detach().float())
    assert out.dtype == torch.bfloat16
    # What each choice gives by itself is a number of bfloat16; only their sum has to be rounded.
    rows = torch.stack(
        [
            low(x.detach().bfloat16(), choice, torch.ones(choice.shape))
            for choice in indices.split(1, dim=1)
        ],
        dim=1,
    )
    exact = (rows.double() * weights.detach().float().double().unsqueeze(-1)).sum(1)
    half_a_unit = 2.0**-8 * exact.abs() * (1 + 1e-4)
    assert ((out.double() - exact).abs() <= half_a_unit).all()
    rounded_between = (rows * weights.detach().bfloat16().unsqueeze(-1)).sum(1)
    assert not ((rounded_between.double() - exact).abs() <= half_a_unit).all()


def test_shapes_are_found_on_the_meta_device():
    experts, x, indices, weights = (t.to("meta") for t in made())
    assert experts(x, indices, weights).shape == (T, D)
