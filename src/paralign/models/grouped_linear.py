"""One linear layer per expert, over rows sorted by expert.

Two forms of the same sum; :func:`choose_form` takes the faster one that can be had.

[Note: forms]
``grouped``: torch's ``grouped_mm``: the form for accelerators, and for float32 on a CPU, where
``bench/moe.py`` finds it the fastest of five forms for few rows an expert and for many. It takes
neither float64 nor rows that are no multiple of 16 bytes.
``loop``: one matmul an expert, written straight into its part of the result: no padding, no copy,
any dtype. On a CPU within about a tenth of ``grouped``; batched matmuls over padded rows are slower
than both.
``blocked_experts.py`` is faster than either on a CPU where activations are large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from paralign.contiguous import contiguous_gradient

Form = Literal["loop", "grouped"]


def grouped_linear(
    x_RI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, counts: Sequence[int]
) -> Tensor:
    """Apply expert e's linear layer to its ``counts[e]`` rows.

    Shapes (R rows, E experts, I input and O output features):
        x_RI: ``[R, I]``: first the rows of expert 0, then those of expert 1, ...
        weight_EOI: ``[E, O, I]``, each expert's as in ``torch.nn.Linear``.
        bias_EO: ``[E, O]`` or None.
        counts: E numbers that add up to R.
        returns: ``[R, O]``.

    Exact: each row is an ordinary linear layer's. Experts without rows get zero gradients.
    """
    if choose_form(x_RI, weight_EOI) == "grouped":
        return _grouped_mm(x_RI, weight_EOI, bias_EO, counts)
    result: Tensor = _GroupedLinear.apply(x_RI, weight_EOI, bias_EO, counts)  # type: ignore[no-untyped-call]
    return result


def choose_form(x_RI: Tensor, weight_EOI: Tensor) -> Form:
    """Return the form that is fastest for these rows on this device."""
    taken = [torch.float32] if x_RI.device.type == "cpu" else [torch.float32, torch.bfloat16]
    is_aligned = all(size * x_RI.element_size() % 16 == 0 for size in weight_EOI.shape[1:])
    return "grouped" if x_RI.dtype in taken and is_aligned and x_RI.shape[0] else "loop"


class _GroupedLinear(torch.autograd.Function):
    """The loop, forward and backward, without the copies that indexing would make."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias, ctx.counts = bias is not None, counts
        out = x.new_empty(x.shape[0], weight.shape[1])
        for e, rows in _slices(counts):
            if bias is None:
                torch.mm(x[rows], weight[e].t(), out=out[rows])
            else:
                torch.addmm(bias[e], x[rows], weight[e].t(), out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_x else None
        dweight = torch.empty_like(weight) if needs_weight else None
        dbias = grad.new_zeros(weight.shape[:2]) if needs_bias else None
        for e, rows in _slices(ctx.counts):
            if dx is not None:
                torch.mm(grad[rows], weight[e], out=dx[rows])
            if dweight is not None:
                torch.mm(grad[rows].t(), x[rows], out=dweight[e])
            if dbias is not None:
                torch.sum(grad[rows], 0, out=dbias[e])
        if dweight is not None:
            for e, count in enumerate(ctx.counts):
                if count == 0:
                    dweight[e].zero_()
        return dx, dweight, dbias, None


def _slices(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Return (expert, its rows) for every expert that has any."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


def _grouped_mm(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int]) -> Tensor:
    number = torch.tensor(counts, device=x.device)
    ends = number.cumsum(0, dtype=torch.int32)
    # Its backward takes no expanded or strided gradient.
    out = contiguous_gradient(F.grouped_mm(x, weight.transpose(1, 2), offs=ends))
    if bias is not None:
        out = out + bias.repeat_interleave(number, 0, output_size=x.shape[0])
    return out
