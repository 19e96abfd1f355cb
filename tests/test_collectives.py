"""Each collective moves what it says, and its backward is the transpose of its forward."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paralign import collectives
from paralign.collectives import (
    all_gather_dim,
    all_gather_stack,
    all_reduce_backward,
    all_reduce_forward,
    all_to_all_dims,
    all_to_all_rows,
    fused_all_to_all_dims,
    reduce_scatter_dim,
)
from paralign.errors import LayoutError
from paralign.testing import run_on_ranks

DEGREES = (1, 2, 3)


def _world() -> tuple[dist.ProcessGroup, int, int]:
    group = dist.group.WORLD
    assert group is not None
    return group, dist.get_rank(), dist.get_world_size()


def _global(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _exchange_everywhere(pack_below: int) -> int:
    """Check every pair of dims against the global tensor; return how many were checked."""
    collectives._PACK_BELOW_BYTES = pack_below  # this process only
    group, rank, n = _world()
    checked = 0
    for split_dim, concat_dim in itertools.permutations(range(4), 2):
        wholes = [
            _global(seed, *(2 * n, 3 * n, 4 * n, n * width)) for seed, width in ((0, 5), (1, 3))
        ]
        grads = [_global(seed + 2, *whole.shape) for seed, whole in enumerate(wholes)]
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
    group, rank, n = _world()
    whole = _global(0, 1, 4, 8, 5)
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


def _gather_and_reduce() -> tuple[float, float]:
    group, rank, n = _world()
    whole, worst = _global(0, 2, 3 * n, 4), 0.0
    piece = whole.chunk(n, 1)[rank].requires_grad_()
    gathered = all_gather_dim(piece, dim=1, group=group)
    assert torch.equal(gathered, whole)
    # Every rank uses the gathered tensor with its own weights: the gradient is the sum over ranks.
    weights = [_global(10 + r, *whole.shape) for r in range(n)]
    gathered.backward(weights[rank])
    total = torch.stack(weights).sum(0)
    assert piece.grad is not None
    worst = float((piece.grad - total.chunk(n, 1)[rank]).abs().max())

    term = weights[rank].requires_grad_()
    share = reduce_scatter_dim(term, dim=-2, group=group)
    off = float((share - total.chunk(n, 1)[rank]).abs().max())
    grad = _global(20, *whole.shape)
    share.backward(grad.chunk(n, 1)[rank])
    assert term.grad is not None
    assert torch.equal(term.grad, grad)
    return worst, off


@pytest.mark.ranks
@pytest.mark.parametrize("degree", DEGREES)
def test_gather_sums_gradients_and_reduce_scatter_gathers_them(degree: int):
    for errors in run_on_ranks(_gather_and_reduce, degree):
        assert max(errors) <= 1e-14


def _second_derivative() -> bool:
    group, _, _ = _world()
    x = _global(3, 2, 4, 4).requires_grad_()

    def cubed(x: Tensor) -> Tensor:
        y = all_to_all_dims(x, split_dim=1, concat_dim=2, group=group)
        return (all_gather_stack(y, group=group)[0] ** 3).sum()

    (first,) = torch.autograd.grad(cubed(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return bool((second - 6 * x).abs().max() <= 1e-13)


@pytest.mark.ranks
def test_a_backward_can_be_differentiated_again():
    assert run_on_ranks(_second_derivative, 1) == [True]


def _on_meta() -> list[tuple[int, ...]]:
    group, _, _ = _world()
    x = torch.empty(2, 4, 6, device="meta")
    return [
        tuple(all_to_all_dims(x, split_dim=1, concat_dim=2, group=group).shape),
        tuple(all_gather_dim(x, dim=0, group=group).shape),
        tuple(reduce_scatter_dim(x, dim=2, group=group).shape),
    ]


@pytest.mark.ranks
def test_on_meta_only_shapes_are_computed():
    assert run_on_ranks(_on_meta, 2) == [[(2, 2, 12), (4, 4, 6), (2, 4, 3)]] * 2


def _refused() -> list[str]:
    group, _, _ = _world()
    x, messages = torch.zeros(2, 3, 4), []
    for wrong in (
        lambda: all_to_all_dims(x, split_dim=1, concat_dim=2, group=group),
        lambda: all_to_all_dims(x, split_dim=2, concat_dim=2, group=group),
        lambda: all_to_all_dims(x, split_dim=-1, concat_dim=1, group=group),
        lambda: fused_all_to_all_dims((x, x.double()), split_dim=1, concat_dim=2, group=group),
        lambda: reduce_scatter_dim(x, dim=1, group=group),
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
        f"dim=1 of shape [2, 3, 4] {uneven} (remainder 1). Pad it to a multiple of 2.",
    ]


def _sum_forward_and_backward() -> list[bool]:
    group, rank, n = _world()
    mine = [_global(seed, 3, 4).t() for seed in range(n)]  # strided, as a matmul may leave them
    grad = _global(9, 4, 3)
    x = mine[rank].clone().requires_grad_()
    total = all_reduce_forward(x, group=group)
    total.backward(grad)
    y = _global(7, 4, 3).requires_grad_()
    same = all_reduce_backward(y, group=group)
    same.backward(mine[rank])
    assert x.grad is not None and y.grad is not None
    everything = torch.stack(mine).sum(0)
    return [
        torch.allclose(total, everything, rtol=1e-14),
        torch.equal(x.grad, grad),
        torch.equal(same, y),
        torch.allclose(y.grad, everything, rtol=1e-14),
        torch.equal(x, mine[rank]),  # an argument is not summed in place
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("degree", DEGREES)
def test_a_sum_passes_its_gradient_on_and_a_copy_sums_it(degree: int):
    assert run_on_ranks(_sum_forward_and_backward, degree) == [[True] * 5] * degree


def _send_rows() -> bool:
    """Send ``(r + 2 * other) % 3`` rows to each other rank: none to some."""
    group, rank, n = _world()

    def rows(sender: int, receiver: int) -> Tensor:
        return _global(10 * sender + receiver, 4, 2)[: (sender + 2 * receiver) % 3]

    send = [len(rows(rank, other)) for other in range(n)]
    receive = [len(rows(other, rank)) for other in range(n)]
    x = torch.cat([rows(rank, other) for other in range(n)]).requires_grad_()
    got = all_to_all_rows(x, send=send, receive=receive, group=group)
    assert torch.equal(got, torch.cat([rows(other, rank) for other in range(n)]))
    got.square().sum().backward()  # the gradient of each row comes back to where it came from
    assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())
    try:
        all_to_all_rows(x.detach(), send=[9] * n, receive=receive, group=group)
    except LayoutError as error:
        return "Give each row a rank" in str(error)
    return False


@pytest.mark.ranks
@pytest.mark.parametrize("degree", DEGREES)
def test_rows_go_where_they_are_due_in_uneven_numbers(degree: int):
    assert all(run_on_ranks(_send_rows, degree))
