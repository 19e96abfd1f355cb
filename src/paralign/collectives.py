"""Differentiable collectives, each with its backward pair.

=====================  =====================  ==========================================
forward                backward               who receives what (n ranks)
=====================  =====================  ==========================================
``all_to_all_dims``    ``all_to_all_dims``,   every rank: one n-th of every rank's tensor
                       dims exchanged
``all_gather_dim``     ``reduce_scatter_dim`` every rank: every rank's tensor
``reduce_scatter_dim`` ``all_gather_dim``     every rank: the sum of one n-th
=====================  =====================  ==========================================

A gathered tensor is used by every rank, so its gradient is a *sum* over ranks, never only the
rank's own slice. A group of one rank takes the same code path. On the meta device shapes come out
right and nothing is sent, so a model that holds these can be shape-checked without ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.errors import LayoutError


def all_to_all_dims(
    x: Tensor, *, split_dim: int, concat_dim: int, group: dist.ProcessGroup
) -> Tensor:
    """Split ``x`` on one dim over the ranks and get whole the other dim, which was split before.

    ::

        rank 0 holds tokens 0-1      a0 a1 | b0 b1         a0 a1 a2 a3     rank 0 holds head a
        rank 1 holds tokens 2-3      a2 a3 | b2 b3   ->    b0 b1 b2 b3     rank 1 holds head b
        (split_dim: heads a, b; concat_dim: tokens)

    Shapes (n ranks in ``group``):
        x: ``[..., P, ..., Q, ...]`` with ``P`` on ``split_dim`` and ``Q`` on ``concat_dim``.
        returns: the same with ``P / n`` and ``Q * n``; slices are in the order of the ranks.

    Comm:
        forward: one all-to-all; each rank sends ``(n - 1) / n`` of ``x``.
        backward: the same, with the two dims exchanged.

    Exact: elements are only moved.

    Raises:
        LayoutError: ``split_dim`` does not divide, or both dims are the same.
    """
    return fused_all_to_all_dims((x,), split_dim=split_dim, concat_dim=concat_dim, group=group)[0]


def fused_all_to_all_dims(
    tensors: Sequence[Tensor], *, split_dim: int, concat_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Run :func:`all_to_all_dims` on several tensors with one collective.

    They must share a dtype and a device; their shapes are free, so q, k and v of grouped-query or
    latent attention travel together.

    Comm:
        forward: one all-to-all of all tensors. backward: the same.

    Raises:
        LayoutError: As :func:`all_to_all_dims`, or dtypes or devices differ.
    """
    _check_split(tensors, split_dim, concat_dim, dist.get_world_size(group))
    outputs: tuple[Tensor, ...] = _AllToAllDims.apply(group, split_dim, concat_dim, *tensors)  # type: ignore[no-untyped-call]
    return outputs


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
    if x.shape[dim] % degree:
        raise LayoutError(
            f"dim={dim} of shape {list(x.shape)} does not split evenly over {degree} ranks "
            f"(remainder {x.shape[dim] % degree}). Pad it to a multiple of {degree}."
        )
    chunks = torch.stack(x.chunk(degree, dim))
    reduced: Tensor = _ReduceScatterStack.apply(group, chunks)  # type: ignore[no-untyped-call]
    return reduced


class _AllToAllDims(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, split_dim: int, concat_dim: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.route = (group, split_dim, concat_dim)
        return _exchange(tensors, split_dim, concat_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group, split_dim, concat_dim = ctx.route
        # Applied, not called: the backward is itself differentiable.
        return (None, None, None, *_AllToAllDims.apply(group, concat_dim, split_dim, *grads))  # type: ignore[no-untyped-call]


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


def _exchange(
    tensors: Sequence[Tensor], split_dim: int, concat_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Send every other rank its piece of each tensor, through one buffer without a gap for our own.

    A rank's own pieces go straight into the result: with few ranks they are a large part of the data.
    """
    degree, me = dist.get_world_size(group), dist.get_rank(group)
    mine = [_rank_major(x, split_dim, degree) for x in tensors]
    lengths = [x.numel() // degree for x in tensors]
    others = [rank for rank in range(degree) if rank != me]
    send = _pack(mine, others, lengths)
    received = torch.empty_like(send)
    if not send.is_meta:
        sizes = [0 if rank == me else sum(lengths) for rank in range(degree)]
        dist.all_to_all_single(received, send, sizes, sizes, group=group)
    arrived = torch.split(received, lengths * len(others))
    results = []
    for index, piece in enumerate(mine):
        parts = [part.view(piece.shape[1:]) for part in arrived[index :: len(mine)]]
        parts.insert(me, piece[me])
        results.append(torch.cat(parts, concat_dim))  # never a view, so its user may modify it
    return tuple(results)


def _rank_major(x: Tensor, split_dim: int, degree: int) -> Tensor:
    """View ``x`` as ``[n, ...]``: first the piece that goes to rank 0."""
    return torch.unflatten(x, split_dim, (degree, -1)).movedim(split_dim, 0)


def _pack(mine: Sequence[Tensor], others: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Put the pieces for the other ranks behind each other: one copy, or none for a single piece."""
    if len(mine) == len(others) == 1 and mine[0][others[0]].is_contiguous():
        return mine[0][others[0]].view(-1)
    send = mine[0].new_empty(len(others) * sum(lengths))
    places = iter(torch.split(send, [*lengths] * len(others)))
    for rank in others:
        for piece in mine:
            next(places).view(piece.shape[1:]).copy_(piece[rank])
    return send


def _check_split(tensors: Sequence[Tensor], split_dim: int, concat_dim: int, degree: int) -> None:
    problems = []
    if split_dim < 0 or concat_dim < 0 or split_dim == concat_dim:
        problems.append(
            f"split_dim={split_dim} and concat_dim={concat_dim} must be two different dims, "
            "counted from the front"
        )
    elif bad := [list(x.shape) for x in tensors if x.shape[split_dim] % degree]:
        problems.append(
            f"split_dim={split_dim} of shape {', '.join(map(str, bad))} does not split evenly over "
            f"{degree} ranks. Pad it to a multiple of {degree}"
        )
    if len({(x.dtype, x.device) for x in tensors}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in tensors)
        problems.append(f"tensors that share a collective need one dtype and device, not {kinds}")
    if problems:
        raise LayoutError.from_problems("cannot exchange dims", problems)
