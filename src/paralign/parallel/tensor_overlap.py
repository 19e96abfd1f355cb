"""Linears that work on one chunk of the stream while another one is under way.

Both are what ``enter`` and ``leave`` with a plain linear compute, up to the order of sums::

    gather chunk 0 | gather chunk 1 | ...            multiply chunk 0 | multiply chunk 1 | ...
                   | multiply 0     | multiply 1                      | scatter sums 0   | ...

A chunk is the same part of every rank's tokens, so that no token changes its place. A backend with
asynchronous collectives overlaps them with the multiplications.

Ref:
    Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
    Learning Models", ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paralign.collectives import check_divides

NUM_CHUNKS = 4  # of a rank's tokens, or as many as it has tokens


def gathered_linears(
    x: Tensor, weights: Sequence[Tensor], *, dim: int, group: dist.ProcessGroup
) -> tuple[Tensor, list[Tensor]]:
    """Gather the stream along ``dim`` and multiply it by each weight.

    Shapes (n ranks):
        x: ``[..., P, ..., K]`` with ``P`` tokens on ``dim``. weights: ``[O, K]``.
        returns: the whole stream ``[..., P * n, ..., K]``, and ``[..., P * n, ..., O]`` for each.

    Comm:
        forward: ``min(NUM_CHUNKS, P)`` all-gathers, together as large as one of ``x``; backward as
        many reduce-scatters.
    """
    whole, *outputs = _GatheredLinears.apply(dim, group, x, *weights)  # type: ignore[no-untyped-call]
    return whole, outputs


def scattered_linear(x: Tensor, weight: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Multiply by ``weight``, sum over the ranks and keep this rank's tokens.

    Shapes (n ranks):
        x: ``[..., P * n, ..., K]``. weight: ``[O, K]``. returns: ``[..., P, ..., O]``.

    Comm:
        forward: ``min(NUM_CHUNKS, P)`` reduce-scatters; backward as many all-gathers.

    Raises:
        LayoutError: ``dim`` does not divide by the number of ranks.
    """
    check_divides(x, dim, dist.get_world_size(group))
    out: Tensor = _ScatteredLinear.apply(dim, group, x, weight)  # type: ignore[no-untyped-call]
    return out


class Handoff:
    """Passes what linears give from the module whose input is gathered to the linears themselves.

    Attributes:
        weights: One function a linear, which returns its local weight, or None while FSDP has it in
            shards.
    """

    def __init__(self) -> None:
        self.weights: list[Callable[[], Tensor | None]] = []
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def register(self, weight: Callable[[], Tensor | None]) -> int:
        """Take part; returns the number to ask for the output with."""
        self.weights.append(weight)
        return len(self.weights) - 1

    def gather(self, x: Tensor, *, dim: int, group: dist.ProcessGroup) -> Tensor:
        """Gather ``x`` and meanwhile multiply it by every weight that is at hand."""
        weights = {n: w for n, weight in enumerate(self.weights) if (w := weight()) is not None}
        self._input, outputs = gathered_linears(x, list(weights.values()), dim=dim, group=group)
        self._outputs = dict(zip(weights, outputs, strict=True))
        return self._input

    def take(self, number: int, x: Tensor) -> Tensor | None:
        """Return what a linear gives for ``x``, once; None: it is not what was gathered."""
        return self._outputs.pop(number, None) if x is self._input else None

    def clear(self) -> None:
        """Forget everything, when the module is done."""
        self._input, self._outputs = None, {}


class _GatheredLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dim: int, group: dist.ProcessGroup, x: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.route = dim, group
        gathers = [_Gather(chunk, group) for chunk in _chunks(x, dim)]
        pieces: list[Tensor] = []  # ranks, then this chunk's tokens
        products: list[list[Tensor]] = [[] for _ in weights]
        for gather in gathers:
            pieces.append(gather.wait().movedim(0, dim))
            for product, weight in zip(products, weights, strict=True):
                product.append(F.linear(pieces[-1], weight))
        whole = _join(pieces, dim)
        ctx.save_for_backward(whole, *weights)
        return whole, *(_join(product, dim) for product in products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        dim, group = ctx.route
        whole, *weights = ctx.saved_tensors
        pairs = [(g, w) for g, w in zip(grads[1:], weights, strict=True) if g is not None]
        scatters = []
        if ctx.needs_input_grad[2]:
            parts = [_chunks(_by_rank(g, dim, group), dim + 1) for g, _ in pairs]
            own = None if grads[0] is None else _chunks(_by_rank(grads[0], dim, group), dim + 1)
            for number in range(min(NUM_CHUNKS, whole.shape[dim] // dist.get_world_size(group))):
                terms = [] if own is None else [own[number]]  # the stream was used by itself
                terms += [p[number].matmul(w) for p, (_, w) in zip(parts, pairs, strict=True)]
                scatters.append(_Scatter(_sum(terms).movedim(dim, 0), group))
        # While sums are on their way.
        of_weights = [
            None if g is None or not needed else _outer(g, whole)
            for g, needed in zip(grads[1:], ctx.needs_input_grad[3:], strict=True)
        ]
        grad_x = torch.cat([scatter.wait() for scatter in scatters], dim) if scatters else None
        return None, None, grad_x, *of_weights


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
        ctx.route = dim, group
        ctx.save_for_backward(x, weight)
        chunks = _chunks(_by_rank(x, dim, group), dim + 1)
        scatters = [_Scatter(F.linear(chunk, weight).movedim(dim, 0), group) for chunk in chunks]
        return torch.cat([scatter.wait() for scatter in scatters], dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dim, group = ctx.route
        x, weight = ctx.saved_tensors
        gathers = [_Gather(chunk, group) for chunk in _chunks(grads[0], dim)]
        pieces, parts = [], []
        for gather in gathers:
            pieces.append(gather.wait().movedim(0, dim))
            parts.append(pieces[-1].matmul(weight))
        of_weight = _outer(_join(pieces, dim), x) if ctx.needs_input_grad[3] else None
        return None, None, _join(parts, dim), of_weight


class _Gather:
    """An all-gather under way: the ranks' pieces, stacked."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = x.contiguous()  # alive until it has left
        self._stacked = x.new_empty((dist.get_world_size(group), *x.shape))
        self._work: Any = dist.all_gather_single(
            self._stacked.view(-1), self._sent.view(-1), group=group, async_op=True
        )

    def wait(self) -> Tensor:
        self._work.wait()
        return self._stacked


class _Scatter:
    """A reduce-scatter under way, of pieces that are stacked by rank."""

    def __init__(self, stacked: Tensor, group: dist.ProcessGroup) -> None:
        self._sent = stacked.contiguous()
        self._sum = stacked.new_empty(stacked.shape[1:])
        self._work: Any = dist.reduce_scatter_single(
            self._sum.view(-1),
            self._sent.view(-1),
            op=dist.ReduceOp.SUM,
            group=group,
            async_op=True,
        )

    def wait(self) -> Tensor:
        self._work.wait()
        return self._sum


def _chunks(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return x.tensor_split(min(NUM_CHUNKS, x.shape[dim]), dim)


def _by_rank(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Split ``dim`` into ranks and the tokens of each."""
    pieces: Tensor = x.unflatten(dim, (dist.get_world_size(group), -1))
    return pieces


def _join(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """Put chunks of every rank's tokens together: rank by rank."""
    return torch.cat(list(pieces), dim + 1).flatten(dim, dim + 1)


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of a weight."""
    of_weight: Tensor = grad.flatten(0, -2).t().mm(x.flatten(0, -2))
    return of_weight
