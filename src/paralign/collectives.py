"""Differentiable collectives, each with its backward pair; see also ``all_to_all.py``.

=======================  ======================  =========================================
forward                  backward                who receives what (n ranks)
=======================  ======================  =========================================
``all_gather_dim``       ``reduce_scatter_dim``  every rank: every rank's tensor
``reduce_scatter_dim``   ``all_gather_dim``      every rank: the sum of one n-th
``all_to_all_rows``      ``all_to_all_rows``,    every rank: some rows of every rank's tensor
                         numbers exchanged
``all_reduce_forward``   identity                every rank: the sum
``all_reduce_backward``  all-reduce (sum)        every rank: what it had
``split_dim``            ``join_dim``            every rank: its slice of what all have
``join_dim``             ``split_dim``           every rank: every rank's slice
=======================  ======================  =========================================

A gathered tensor is used by every rank, so its gradient is a *sum* over ranks, never only the
rank's own slice. The last four are for tensors that every rank holds whole: what comes out of a sum
or is joined has the same gradient on every rank, and what every rank uses a part of gets its
gradient in parts. A group of one rank takes the same code path. On the meta device shapes come out
right and nothing is sent, so a model that holds these can be shape-checked without ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.errors import LayoutError


def all_to_all_rows(
    x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows of ``x`` to every rank, as many as each is due, and get theirs.

    ::

        rank 0   a0 a1 | b0          send 2, 1       ->   a0 a1 | c0     receive 2, 1
        rank 1   c0 | d0 d1 d2       send 1, 3       ->   b0 | d0 d1 d2  receive 1, 3

    Shapes (n ranks in ``group``):
        x: ``[sum(send), ...]``: first the rows for rank 0.
        returns: ``[sum(receive), ...]``: first the rows from rank 0. Either may be empty.

    Comm:
        forward: one all-to-all; all but the rank's own rows leave it.
        backward: the same, with the two numbers exchanged.

    Exact: elements are only moved.

    Args:
        x: Rows, in the order of the ranks they go to.
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The ranks.

    Raises:
        LayoutError: ``x`` has another number of rows than ``send`` says.
    """
    if x.shape[0] != sum(send):
        raise LayoutError(
            f"x has {x.shape[0]} rows, but send={list(send)} adds up to {sum(send)}. Give each "
            "row a rank."
        )
    result: Tensor = _AllToAllRows.apply(group, tuple(send), tuple(receive), x)  # type: ignore[no-untyped-call]
    return result


def all_gather_dim(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Get every rank's ``x``, concatenated on ``dim`` in the order of the ranks.

    ::

        rank 0:  x0            x0 x1      backward   rank 0:  dx0 of rank 0 + dx0 of rank 1
        rank 1:  x1     ->     x0 x1      <-         rank 1:  dx1 of rank 0 + dx1 of rank 1

    Shapes (n ranks in ``group``):
        x: ``[..., P, ...]``, equal on every rank. returns: ``[..., P * n, ...]``.

    Comm:
        forward: one all-gather; each rank receives ``n - 1`` times ``x``.
        backward: one reduce-scatter (sum) of the same size.

    Exact forward; the backward sums ``n`` contributions, in the order the backend chooses.
    """
    return torch.cat(all_gather_stack(x, group=group).unbind(0), dim)


def all_gather_stack(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Get every rank's ``x``, stacked on a new first dim in the order of the ranks.

    What :func:`all_gather_dim` is made of, for callers that put the pieces together in another
    order.

    Shapes (n ranks in ``group``):
        x: ``[...]``, equal on every rank. returns: ``[n, ...]``.

    Comm:
        forward: one all-gather. backward: one reduce-scatter (sum).
    """
    stacked: Tensor = _AllGatherStack.apply(group, x)  # type: ignore[no-untyped-call]
    return stacked


def reduce_scatter_dim(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over the ranks and keep this rank's slice of ``dim``.

    Shapes (n ranks in ``group``):
        x: ``[..., P, ...]``, equal on every rank. returns: ``[..., P / n, ...]``.

    Comm:
        forward: one reduce-scatter (sum); each rank sends ``(n - 1) / n`` of ``x``.
        backward: one all-gather of the same size.

    Close: the backend chooses the order of the ``n`` terms.

    Raises:
        LayoutError: ``dim`` does not divide by the number of ranks.
    """
    degree = dist.get_world_size(group)
    check_divides(x, dim, degree)
    chunks = torch.stack(x.chunk(degree, dim))
    reduced: Tensor = _ReduceScatterStack.apply(group, chunks)  # type: ignore[no-untyped-call]
    return reduced


def check_divides(x: Tensor, dim: int, degree: int) -> None:
    """Raise ``LayoutError`` unless ``dim`` of ``x`` splits evenly over ``degree`` ranks."""
    if x.shape[dim] % degree:
        raise LayoutError(
            f"dim={dim} of shape {list(x.shape)} does not split evenly over {degree} ranks "
            f"(remainder {x.shape[dim] % degree}). Pad it to a multiple of {degree}."
        )


def all_reduce_forward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Sum ``x`` over the ranks; the sum's gradient, the same on every rank, is that of each term.

    Use it where ranks hold summands and go on alike with the sum.

    Shapes:
        x: any, equal on every rank. returns: the same.

    Comm:
        forward: one all-reduce (sum). backward: none.

    Close: the backend chooses the order of the ``n`` terms.
    """
    total: Tensor = _AllReduceForward.apply(group, x)  # type: ignore[no-untyped-call]
    return total


def all_reduce_backward(x: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """Return ``x``, which is the same on every rank, and sum the gradients that the ranks give it.

    Use it where every rank goes on with a different part of the work.

    Shapes:
        x: any, equal on every rank. returns: the same.

    Comm:
        forward: none. backward: one all-reduce (sum).

    Exact forward; the backend chooses the order of the ``n`` terms of the gradient.
    """
    same: Tensor = _AllReduceBackward.apply(group, x)  # type: ignore[no-untyped-call]
    return same


def split_dim(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Keep this rank's slice of ``x``, which is the same on every rank; its gradient is made whole.

    Use it where every rank goes on with its own part of the tokens.

    Shapes (n ranks in ``group``):
        x: ``[..., P, ...]``. returns: ``[..., P / n, ...]``.

    Comm:
        forward: none. backward: one all-gather; each rank receives ``n - 1`` times its slice.

    Exact: elements are only moved.

    Raises:
        LayoutError: ``dim`` does not divide by the number of ranks.
    """
    check_divides(x, dim, dist.get_world_size(group))
    own: Tensor = _SplitDim.apply(group, dim, x)  # type: ignore[no-untyped-call]
    return own


def join_dim(x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Get every rank's ``x``, concatenated on ``dim``, and go on alike with it on every rank.

    Unlike that of :func:`all_gather_dim`, the gradient that comes back is the same on every rank,
    so that each keeps its slice and nothing is summed.

    Shapes (n ranks in ``group``):
        x: ``[..., P, ...]``, equal on every rank. returns: ``[..., P * n, ...]``.

    Comm:
        forward: one all-gather; each rank receives ``n - 1`` times ``x``. backward: none.

    Exact: elements are only moved.
    """
    joined: Tensor = _JoinDim.apply(group, dim, x)  # type: ignore[no-untyped-call]
    return joined


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: dist.ProcessGroup,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        x: Tensor,
    ) -> Tensor:
        ctx.route = (group, receive, send)
        received = x.new_empty((sum(receive), *x.shape[1:]))
        if not x.is_meta:
            dist.all_to_all_single(received, x.contiguous(), list(receive), list(send), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, _AllToAllRows.apply(*ctx.route, grad)  # type: ignore[no-untyped-call]


class _AllGatherStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        stacked = x.new_empty((dist.get_world_size(group), *x.shape))
        if not x.is_meta:
            dist.all_gather_single(stacked.view(-1), x.contiguous().view(-1), group=group)
        return stacked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _ReduceScatterStack.apply(ctx.group, grad)  # type: ignore[no-untyped-call]


class _ReduceScatterStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, stacked: Tensor) -> Tensor:
        ctx.group = group
        reduced = stacked.new_empty(stacked.shape[1:])
        if not stacked.is_meta:
            dist.reduce_scatter_single(
                reduced.view(-1), stacked.contiguous().view(-1), op=dist.ReduceOp.SUM, group=group
            )
        return reduced

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _AllGatherStack.apply(ctx.group, grad)  # type: ignore[no-untyped-call]


class _AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        if not x.is_meta:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _AllReduceBackward.apply(ctx.group, grad)  # type: ignore[no-untyped-call]


class _AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, _AllReduceForward.apply(ctx.group, grad)  # type: ignore[no-untyped-call]


class _SplitDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, dim: int, x: Tensor) -> Tensor:
        ctx.route = (group, dim)
        own = x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _JoinDim.apply(*ctx.route, grad)  # type: ignore[no-untyped-call]


class _JoinDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, dim: int, x: Tensor) -> Tensor:
        ctx.route = (group, dim)
        stacked: Tensor = _AllGatherStack.apply(group, x)  # type: ignore[no-untyped-call]
        return torch.cat(stacked.unbind(0), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _SplitDim.apply(*ctx.route, grad)  # type: ignore[no-untyped-call]
