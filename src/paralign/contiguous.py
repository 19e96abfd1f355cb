"""Other shapes and strides of a tensor, for those who take no view of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def contiguous_gradient(x: Tensor) -> Tensor:
    """Return ``x``; the gradient that comes back to it is contiguous.

    Gradients that are sent to another rank, and those of ``grouped_mm``, must be.
    """
    same: Tensor = _ContiguousGradient.apply(x)  # type: ignore[no-untyped-call]
    return same


def in_shape_of(x: Tensor, fresh: Tensor) -> Tensor:
    """Return ``fresh``, which nobody else holds, in the shape of ``x``.

    Not as a view: FSDP warns of a module that returns one, as writing into it would lose hooks.
    """
    shaped: Tensor = torch.ops.aten._unsafe_view(fresh, x.shape)
    return shaped


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
