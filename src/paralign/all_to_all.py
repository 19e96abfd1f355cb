"""Exchange two dims of tensors between ranks, differentiably: tokens against heads, and back.

Pieces that stay on their rank are not sent, and with two ranks pieces are sent from, and received
into, their final place where they can be. On the meta device shapes come out right and nothing is
sent.
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
    """Run :func:`all_to_all_dims` on several tensors, small ones with one collective.

    They must share a dtype and a device; their shapes are free, so q, k and v of grouped-query or
    latent attention travel together.

    Comm:
        forward: one all-to-all of all tensors while they are small (1 MiB together), one for each
        when they are large: then copies cost more than messages. backward: the same.

    Raises:
        LayoutError: As :func:`all_to_all_dims`, or dtypes or devices differ.
    """
    _check_split(tensors, split_dim, concat_dim, dist.get_world_size(group))
    outputs: tuple[Tensor, ...] = _AllToAllDims.apply(group, split_dim, concat_dim, *tensors)  # type: ignore[no-untyped-call]
    return outputs


def travel_together(num_bytes: int) -> bool:
    """Whether :func:`fused_all_to_all_dims` sends tensors of this size in all as one collective."""
    return num_bytes < _PACK_BELOW_BYTES


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


def _exchange(
    tensors: Sequence[Tensor], split_dim: int, concat_dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Exchange small tensors packed into one collective, large ones each in its own.

    Latency rules small messages, copies rule large ones: a tensor that travels alone need not be
    packed, and its collective is under way while the next one is prepared.
    """
    num_bytes = sum(x.nbytes for x in tensors)
    batches = [tensors] if travel_together(num_bytes) else [[x] for x in tensors]
    started = [_Exchange(batch, split_dim, concat_dim, group) for batch in batches]
    for exchange in started:
        exchange.keep_own()
    return tuple(result for exchange in started for result in exchange.finish())


class _Exchange:
    """One all-to-all under way.

    A rank's own pieces do not pass through the buffers: with few ranks they are a large part of the
    data, and are put in their place while the others travel. With two ranks, the other's piece may
    even be sent from, or received into, its final place.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        split_dim: int,
        concat_dim: int,
        group: dist.ProcessGroup,
    ) -> None:
        degree, self.me = dist.get_world_size(group), dist.get_rank(group)
        self.others = [rank for rank in range(degree) if rank != self.me]
        self.mine = [_rank_major(x, split_dim, degree) for x in tensors]
        # New tensors, never views, so that autograd lets the user of a result modify it.
        self.results = [_empty_result(x, split_dim, concat_dim, degree) for x in tensors]
        self.places = [_rank_major(x, concat_dim, degree) for x in self.results]
        self.lengths = [x.numel() // degree for x in tensors]
        self.send = _pack(self.mine, self.others, self.lengths)  # alive until it has left
        alone = _only_piece(self.places, self.others)
        self.is_in_place = alone is not None
        self.received = torch.empty_like(self.send) if alone is None else alone
        self.work: Any = None
        if not self.send.is_meta:
            sizes = [0 if rank == self.me else sum(self.lengths) for rank in range(degree)]
            self.work = dist.all_to_all_single(
                self.received, self.send, sizes, sizes, group=group, async_op=True
            )

    def keep_own(self) -> None:
        """Copy this rank's own pieces to their places."""
        for piece, place in zip(self.mine, self.places, strict=True):
            place[self.me].copy_(piece[self.me])

    def finish(self) -> list[Tensor]:
        """Wait for the pieces of the others and put them next to our own."""
        if self.work is not None:
            self.work.wait()
        if not self.is_in_place:
            parts = iter(torch.split(self.received, [*self.lengths] * len(self.others)))
            for rank in self.others:
                for place in self.places:
                    place[rank].copy_(next(parts).view(place.shape[1:]))
        return self.results


def _empty_result(x: Tensor, split_dim: int, concat_dim: int, degree: int) -> Tensor:
    shape = list(x.shape)
    shape[split_dim] //= degree
    shape[concat_dim] *= degree
    return x.new_empty(shape)


def _rank_major(x: Tensor, dim: int, degree: int) -> Tensor:
    """View ``x`` as ``[n, ...]``: first the piece that goes to rank 0, or comes from it."""
    return torch.unflatten(x, dim, (degree, -1)).movedim(dim, 0)


def _only_piece(pieces: Sequence[Tensor], others: Sequence[int]) -> Tensor | None:
    """Return the one piece that goes to, or comes from, another rank if it is contiguous."""
    if len(pieces) == len(others) == 1 and pieces[0][others[0]].is_contiguous():
        return pieces[0][others[0]].view(-1)
    return None


def _pack(mine: Sequence[Tensor], others: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Put the pieces for the other ranks in a row: one copy, or none for a single piece."""
    if (alone := _only_piece(mine, others)) is not None:
        return alone
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


# Measured on gloo: below it one collective for q, k and v is faster, above it one for each.
_PACK_BELOW_BYTES = 1 << 20
