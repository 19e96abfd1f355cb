"""Dims are exchanged as they should be, there and back, whichever way the pieces travel."""

from __future__ import annotations

import itertools

import pytest
import torch

from paralign import all_to_all
from paralign.all_to_all import all_to_all_dims, fused_all_to_all_dims
from paralign.errors import LayoutError
from paralign.testing import run_on_ranks
from tests.test_collectives import DEGREES, seeded, world


def _exchange_everywhere(pack_below: int) -> int:
    """Check every pair of dims against the global tensor; return how many were checked."""
    all_to_all._PACK_BELOW_BYTES = pack_below  # this process only
    group, rank, n = world()
    checked = 0
    for split_dim, concat_dim in itertools.permutations(range(4), 2):
        wholes = [
            seeded(seed, *(2 * n, 3 * n, 4 * n, n * width)) for seed, width in ((0, 5), (1, 3))
        ]
        grads = [seeded(seed + 2, *whole.shape) for seed, whole in enumerate(wholes)]
        pieces = [x.chunk(n, concat_dim)[rank].requires_grad_() for x in wholes]
        outputs = fused_all_to_all_dims(
            pieces, split_dim=split_dim, concat_dim=concat_dim, group=group
        )
        for output, whole in zip(outputs, wholes, strict=True):
            assert torch.equal(output, whole.chunk(n, split_dim)[rank])
            assert output.is_contiguous()
            assert not output._is_view()
        torch.autograd.backward(outputs, [g.chunk(n, split_dim)[rank] for g in grads])
        for piece, grad in zip(pieces, grads, strict=True):
            assert piece.grad is not None
            assert torch.equal(piece.grad, grad.chunk(n, concat_dim)[rank])
            checked += 1
    return checked


@pytest.mark.ranks
@pytest.mark.parametrize("pack_below", [0, 1 << 30], ids=["one_by_one", "packed"])
@pytest.mark.parametrize("degree", DEGREES)
def test_all_to_all_exchanges_any_two_dims_and_back(degree: int, pack_below: int):
    assert run_on_ranks(_exchange_everywhere, degree, pack_below) == [24] * degree


def _exchange_rows_of_one() -> bool:
    """One leading row: pieces are sent from, or received into, their final place."""
    group, rank, n = world()
    whole = seeded(0, 1, 4, 8, 5)
    tokens = whole.chunk(n, 2)[rank].contiguous().requires_grad_()
    heads = all_to_all_dims(tokens, split_dim=1, concat_dim=2, group=group)
    back = all_to_all_dims(heads, split_dim=2, concat_dim=1, group=group)
    back.backward(tokens.detach() * 2)
    assert not back._is_view()
    assert torch.equal(heads, whole.chunk(n, 1)[rank])
    assert tokens.grad is not None
    return torch.equal(back, tokens) and torch.equal(tokens.grad, tokens.detach() * 2)


@pytest.mark.ranks
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_all_to_all_there_and_back_is_the_identity(degree: int):
    assert run_on_ranks(_exchange_rows_of_one, degree) == [True] * degree


def _refused() -> list[str]:
    group, _, _ = world()
    x, messages = torch.zeros(2, 3, 4), []
    for wrong in (
        lambda: all_to_all_dims(x, split_dim=1, concat_dim=2, group=group),
        lambda: all_to_all_dims(x, split_dim=2, concat_dim=2, group=group),
        lambda: all_to_all_dims(x, split_dim=-1, concat_dim=1, group=group),
        lambda: fused_all_to_all_dims((x, x.double()), split_dim=1, concat_dim=2, group=group),
    ):
        try:
            wrong()
        except LayoutError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_dims_that_do_not_fit_are_refused():
    two = "must be two different dims, counted from the front"
    uneven = "does not split evenly over 2 ranks"
    assert run_on_ranks(_refused, 2)[0] == [
        f"cannot exchange dims: split_dim=1 of shape [2, 3, 4] {uneven}. Pad it to a multiple of 2",
        f"cannot exchange dims: split_dim=2 and concat_dim=2 {two}",
        f"cannot exchange dims: split_dim=-1 and concat_dim=1 {two}",
        "cannot exchange dims:\n"
        f"  - split_dim=1 of shape [2, 3, 4], [2, 3, 4] {uneven}. Pad it to a multiple of 2\n"
        "  - tensors that share a collective need one dtype and device, not torch.float32 on cpu, "
        "torch.float64 on cpu",
    ]
