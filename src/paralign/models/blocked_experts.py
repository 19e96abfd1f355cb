"""Gated experts on a CPU, over many rows: a few experts at a time, in memory that is used again.

Made operation by operation over all rows, large activations cost more than their arithmetic: each
is a new piece of memory, which the system clears page by page, and it leaves the caches before it
is read. Here the rows of a few experts are taken from the tokens, multiplied and added to the sum,
forward and backward, before those of the next. Three products of every block are kept for the
backward, each in a tensor of its own: pieces of one large one would be new memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MAPPED_BYTES = 32 << 20
"""From this size on the C library maps every tensor anew, so that its pages are cleared each time;
smaller ones are faster made whole, as ``bench/moe.py`` measures."""
ROWS_AT_ONCE = 1024
"""A block ends with the expert that brings it to as many rows."""

Operation = Callable[[Tensor, Tensor], Tensor]


class Stack(NamedTuple):
    """Weights ``[E, O, I]`` and biases ``[E, O]`` (or None) of a stack of gated experts."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def pays(x: Tensor, num_rows: int, width: int) -> bool:
    """Whether ``num_rows`` of ``width`` features are faster made in blocks than whole."""
    return x.device.type == "cpu" and num_rows * width * x.element_size() >= MAPPED_BYTES


def blocked_experts(
    x_TD: Tensor,
    token_R: Tensor,
    share_R: Tensor,
    counts: Sequence[int],
    stack: Stack,
    permute: Operation,
    activate: Operation,
) -> Tensor:
    """Sum what experts make of tokens, each row times its share.

    Shapes (T tokens, R rows sorted by expert, D width, E experts):
        x_TD: ``[T, D]``.
        token_R: ``[R]``, the token of each row.
        share_R: ``[R]``, the factor of each row.
        counts: E numbers of rows that add up to R.
        permute: Takes rows from tokens; what it returns is never kept.
        activate: ``silu(gate) * up``; what it returns is never kept.
        returns: ``[T, D]``, summed in the dtype of ``share_R`` where that is the wider one.

    Exact: each row is an ordinary linear layer's. Experts without rows get zero gradients.
    """
    total: Tensor = _BlockedExperts.apply(  # type: ignore[no-untyped-call]
        counts, permute, activate, x_TD, token_R, share_R, *stack
    )
    return total


class Block(NamedTuple):
    """A run of experts and their rows."""

    experts: slice
    rows: slice
    sizes: list[int]


def blocks(counts: Sequence[int]) -> Iterator[Block]:
    """Cut experts into runs of at least ``ROWS_AT_ONCE`` rows; the last run has what is left."""
    first = row = rows = 0
    for expert, count in enumerate(counts):
        rows += count
        if rows >= ROWS_AT_ONCE or expert == len(counts) - 1:
            stop = expert + 1
            yield Block(slice(first, stop), slice(row, row + rows), list(counts[first:stop]))
            first, row, rows = stop, row + rows, 0


class _BlockedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        counts: Sequence[int],
        permute: Operation,
        activate: Operation,
        x: Tensor,
        token: Tensor,
        share: Tensor,
        *given: Any,
    ) -> Tensor:
        stack = Stack(*given)
        gates, ups, downs = (w.transpose(1, 2).unbind(0) for w in given[:3])
        kept = []
        total = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, share.dtype))
        for block in blocks(counts):
            here, share_R1 = token[block.rows], share[block.rows].unsqueeze(1)
            gate, up, out = (x.new_empty(len(here), w.shape[1]) for w in given[:3])
            kept += [gate, up, out]
            parts = permute(x, here).split(block.sizes)
            _multiply(parts, gates[block.experts], gate.split(block.sizes))
            _multiply(parts, ups[block.experts], up.split(block.sizes))
            _add_bias(gate, stack.gate_bias, block)
            _add_bias(up, stack.up_bias, block)
            hidden = activate(gate, up)
            _multiply(hidden.split(block.sizes), downs[block.experts], out.split(block.sizes))
            _add_bias(out, stack.down_bias, block)
            total.index_add_(0, here, out * share_R1)
        ctx.counts = counts
        ctx.save_for_backward(x, token, share, *given, *kept)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, token, share, *rest = ctx.saved_tensors
        given, kept = rest[: len(Stack._fields)], iter(rest[len(Stack._fields) :])
        needs = ctx.needs_input_grad[6:]
        gates, ups, downs = (w.unbind(0) for w in given[:3])
        dx, dshare = torch.zeros_like(x), torch.empty_like(share)
        # In the order of Stack's fields.
        into = [torch.empty_like(p) if n else None for p, n in zip(given, needs, strict=True)]
        for block in blocks(ctx.counts):
            experts, sizes = block.experts, block.sizes
            here = token[block.rows]
            rows, gate, up, out = x.index_select(0, here), next(kept), next(kept), next(kept)
            parts = rows.split(sizes)
            dout = grad.index_select(0, here)
            activated = F.silu(gate)
            hidden = activated * up
            dshare[block.rows] = (dout * out).sum(1)
            dout = (dout * share[block.rows].unsqueeze(1)).to(x.dtype)
            dhidden = torch.empty_like(hidden)
            _multiply(dout.split(sizes), downs[experts], dhidden.split(sizes))
            _weight_gradient(dout, hidden.split(sizes), block, into[2], into[5])
            dgate = torch.ops.aten.silu_backward(dhidden * up, gate)
            dup = dhidden.mul_(activated)
            _weight_gradient(dgate, parts, block, into[0], into[3])
            _weight_gradient(dup, parts, block, into[1], into[4])
            drows = torch.empty_like(rows)
            places = drows.split(sizes)
            _multiply(dgate.split(sizes), gates[experts], places)
            for dup_e, up_e, place in zip(dup.split(sizes), ups[experts], places, strict=True):
                place.addmm_(dup_e, up_e)
            dx.index_add_(0, here, drows)
        return None, None, None, dx, None, dshare, *into


def _multiply(rows: Sequence[Tensor], weights: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for x, w, place in zip(rows, weights, places, strict=True):
        torch.mm(x, w, out=place)


def _add_bias(rows: Tensor, bias: Tensor | None, block: Block) -> None:
    if bias is not None:
        rows += _each_row(bias, block)


def _each_row(bias: Tensor, block: Block) -> Tensor:
    sizes = torch.tensor(block.sizes)
    return bias[block.experts].repeat_interleave(sizes, 0, output_size=sum(block.sizes))


def _weight_gradient(
    grad: Tensor,
    rows: Sequence[Tensor],
    block: Block,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Write the gradients of the block's experts; those of an expert without rows are zero."""
    if dweight is not None:
        _multiply(grad.t().split(block.sizes, 1), rows, dweight[block.experts].unbind(0))
    if dbias is not None:
        for g, b in zip(grad.split(block.sizes), dbias[block.experts].unbind(0), strict=True):
            torch.sum(g, 0, out=b)
