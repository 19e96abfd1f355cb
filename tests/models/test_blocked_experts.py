"""Experts in blocks of rows give what experts made whole give."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from paralign.models import blocked_experts
from paralign.models.blocked_experts import blocks, pays
from paralign.models.experts import NOT_HERE, Experts
from tests.models.helpers import fill_everything

T, D, H, E, K = 40, 8, 12, 6, 3
BUDGET = 100  # eps


def made(dtype: torch.dtype, bias: bool) -> tuple[Experts, Tensor, Tensor, Tensor]:
    experts = Experts(E, D, H, bias=bias).to(dtype)
    fill_everything(experts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=generator, dtype=dtype).requires_grad_()
    weights, indices = torch.rand(T, E, generator=generator).topk(K)
    indices[indices == 2] = NOT_HERE  # so that nobody chooses expert 2
    weights = weights.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return experts, x, indices, weights


def results(
    experts: Experts, x: Tensor, indices: Tensor, weights: Tensor, rows: int | None
) -> dict[str, Tensor | None]:
    """Return the output and every gradient: in blocks of ``rows``, or None: whole."""
    tensors = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    for tensor in tensors.values():
        tensor.grad = None
    size = float("inf") if rows is None else 0
    with (
        mock.patch.object(blocked_experts, "MAPPED_BYTES", size),
        mock.patch.object(blocked_experts, "ROWS_AT_ONCE", rows),
    ):
        out = experts(x, indices, weights)
        assert ("Blocked" in _creators(out)) == (rows is not None)
        out.double().sin().sum().backward()
    return {"out": out} | {name: tensor.grad for name, tensor in tensors.items()}


def _creators(x: Tensor) -> str:
    """Name the operations that made ``x``, along the first input of each."""
    names, node = [], x.grad_fn
    while node is not None:
        names.append(node.name())
        found = [before for before, _ in node.next_functions if before is not None]
        node = found[0] if found else None
    return " ".join(names)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 30, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_give_what_the_whole_gives(dtype, rows, bias):
    given = made(dtype, bias)
    whole, in_blocks = results(*given, None), results(*given, rows)
    assert whole.keys() == in_blocks.keys()
    for name, expected in whole.items():
        found = in_blocks[name]
        assert expected is not None and found is not None, name
        assert found.dtype == expected.dtype and found.shape == expected.shape
        error = (found.double() - expected.double()).norm() / expected.double().norm()
        assert error <= BUDGET * torch.finfo(dtype).eps, f"{name}: {error:.1e}"


def test_blocks_have_the_derivatives_of_finite_differences():
    experts, x, indices, weights = made(torch.float64, True)
    names = [name for name, _ in experts.named_parameters()]

    def call(x: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
        held = dict(zip(names, parameters, strict=True))
        out: Tensor = torch.func.functional_call(experts, held, (x, indices[:5], weights))
        return out

    with mock.patch.object(blocked_experts, "MAPPED_BYTES", 0):
        few = (x.detach()[:5].requires_grad_(), weights.detach()[:5].double().requires_grad_())
        assert torch.autograd.gradcheck(call, (*few, *experts.parameters()))


@pytest.mark.parametrize("rows", [1, 1000])
def test_an_expert_without_rows_gets_zeros_and_a_frozen_one_nothing(rows):
    experts, x, indices, weights = made(torch.float64, True)
    experts.gate.requires_grad_(False)
    found = results(experts, x, indices, weights, rows)
    assert found.pop("gate") is None
    for name, _ in experts.named_parameters():
        if name != "gate":
            grad = found[name]
            assert grad is not None and not grad[2].any() and grad[3].any(), name


def test_blocks_are_runs_of_experts_with_enough_rows():
    with mock.patch.object(blocked_experts, "ROWS_AT_ONCE", 4):
        cut = list(blocks([1, 3, 9, 0, 2, 1]))
    assert [(b.experts.start, b.experts.stop) for b in cut] == [(0, 2), (2, 3), (3, 6)]
    assert [(b.rows.start, b.rows.stop) for b in cut] == [(0, 4), (4, 13), (13, 16)]
    assert [b.sizes for b in cut] == [[1, 3], [9], [0, 2, 1]]


def test_blocks_pay_for_tensors_that_the_system_maps_anew():
    x = torch.zeros(1, 1)
    assert not pays(x, 10_240, 512)
    assert pays(x, 81_920, 512)
    assert not pays(x.to("meta"), 81_920, 512)
