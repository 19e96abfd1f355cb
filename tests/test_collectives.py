"""Each collective moves what it says, and its backward is the transpose of its forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paralign.all_to_all import all_to_all_dims
from paralign.collectives import (
    all_gather_dim,
    all_gather_stack,
    all_reduce_backward,
    all_reduce_forward,
    all_to_all_rows,
    join_dim,
    reduce_scatter_dim,
    split_dim,
)
from paralign.errors import LayoutError
from paralign.testing import run_on_ranks

DEGREES = (1, 2, 3)


def world() -> tuple[dist.ProcessGroup, int, int]:
    group = dist.group.WORLD
    assert group is not None
    return group, dist.get_rank(), dist.get_world_size()


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gather_and_reduce() -> tuple[float, float]:
    group, rank, n = world()
    whole, worst = seeded(0, 2, 3 * n, 4), 0.0
    piece = whole.chunk(n, 1)[rank].requires_grad_()
    gathered = all_gather_dim(piece, dim=1, group=group)
    assert torch.equal(gathered, whole)
    # Every rank uses the gathered tensor with its own weights: the gradient is the sum over ranks.
    weights = [seeded(10 + r, *whole.shape) for r in range(n)]
    gathered.backward(weights[rank])
    total = torch.stack(weights).sum(0)
    assert piece.grad is not None
    worst = float((piece.grad - total.chunk(n, 1)[rank]).abs().max())

    term = weights[rank].requires_grad_()
    share = reduce_scatter_dim(term, dim=-2, group=group)
    off = float((share - total.chunk(n, 1)[rank]).abs().max())
    grad = seeded(20, *whole.shape)
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
    group, _, _ = world()
    x = seeded(3, 2, 4, 4).requires_grad_()

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
    group, _, _ = world()
    x = torch.empty(2, 4, 6, device="meta")
    return [
        tuple(all_to_all_dims(x, split_dim=1, concat_dim=2, group=group).shape),
        tuple(all_gather_dim(x, dim=0, group=group).shape),
        tuple(reduce_scatter_dim(x, dim=2, group=group).shape),
        tuple(split_dim(x, dim=1, group=group).shape),
        tuple(join_dim(x, dim=1, group=group).shape),
    ]


@pytest.mark.ranks
def test_on_meta_only_shapes_are_computed():
    assert (
        run_on_ranks(_on_meta, 2) == [[(2, 2, 12), (4, 4, 6), (2, 4, 3), (2, 2, 6), (2, 8, 6)]] * 2
    )


def _refused() -> str:
    group, _, _ = world()
    with pytest.raises(LayoutError) as caught:
        reduce_scatter_dim(torch.zeros(2, 3, 4), dim=1, group=group)
    return str(caught.value)


@pytest.mark.ranks
def test_a_dim_that_does_not_divide_is_refused():
    assert run_on_ranks(_refused, 2)[0] == (
        "dim=1 of shape [2, 3, 4] does not split evenly over 2 ranks (remainder 1). Pad it to a "
        "multiple of 2."
    )


def _sum_forward_and_backward() -> list[bool]:
    group, rank, n = world()
    mine = [seeded(seed, 3, 4).t() for seed in range(n)]  # strided, as a matmul may leave them
    grad = seeded(9, 4, 3)
    x = mine[rank].clone().requires_grad_()
    total = all_reduce_forward(x, group=group)
    total.backward(grad)
    y = seeded(7, 4, 3).requires_grad_()
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


def _split_and_join() -> list[bool]:
    group, rank, n = world()
    whole, grad = seeded(0, 3 * n, 2, 4).transpose(0, 1), seeded(1, 2, 3 * n, 4)
    x = whole.clone().requires_grad_()
    own = split_dim(x, dim=1, group=group)
    own.backward(grad.chunk(n, 1)[rank])  # each rank has the gradient of its own part
    piece = whole.chunk(n, 1)[rank].clone().requires_grad_()
    joined = join_dim(piece, dim=1, group=group)
    joined.backward(grad)  # and all go on alike with what is joined
    assert x.grad is not None and piece.grad is not None
    return [
        torch.equal(own, whole.chunk(n, 1)[rank]) and not own._is_view(),
        torch.equal(x.grad, grad),
        torch.equal(joined, whole),
        torch.equal(piece.grad, grad.chunk(n, 1)[rank]),
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("degree", DEGREES)
def test_a_split_makes_its_gradient_whole_and_a_join_cuts_it(degree: int):
    assert run_on_ranks(_split_and_join, degree) == [[True] * 4] * degree


def _send_rows() -> bool:
    """Send ``(r + 2 * other) % 3`` rows to each other rank: none to some."""
    group, rank, n = world()

    def rows(sender: int, receiver: int) -> Tensor:
        return seeded(10 * sender + receiver, 4, 2)[: (sender + 2 * receiver) % 3]

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
