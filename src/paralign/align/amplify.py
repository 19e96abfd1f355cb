"""How far rounding of a gradient may move the update that an adaptive optimizer makes of it.

Adam divides every element by its own size, ``u = lr * m / (sqrt(v) + eps)``, which makes elements
with small gradients move as far as the others: their rounding, small against the whole gradient,
becomes visible in the update. For optimizers of this kind an element's update is relatively no more
off than its gradient is, because the update grows at most in proportion to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paralign.align.measure import parts_of
from paralign.align.pair import Quantity

_SIGN_FLIP = 2.0  # noise above the gradient itself can at most turn the update around


def amplified_noise(update: Quantity, grads: Sequence[Quantity], relative: float) -> float:
    """Return the Frobenius norm of what noise in the gradients may do to ``update``.

    Args:
        update: The reference's update; read in parts.
        grads: The reference's gradients of the steps up to it, of the same shape.
        relative: Noise of a gradient, relative to its norm, spread evenly over its elements.
            Elements with a gradient of exactly zero have none: nothing flowed into them.
    """
    spreads = [relative * _root_mean_square(grad) for grad in grads]
    total = 0.0
    for box in parts_of(update):
        noise = torch.zeros(box.shape, dtype=torch.float64)
        for grad, spread in zip(grads, spreads, strict=True):
            size = grad.fetch(box).abs()
            noise = torch.maximum(noise, torch.where(size == 0, 0.0, spread / size))
        moved = update.fetch(box) * noise.clamp(max=_SIGN_FLIP)
        total = math.hypot(total, float(torch.linalg.vector_norm(moved)))
    return total


def _root_mean_square(quantity: Quantity) -> float:
    norm = 0.0
    for box in parts_of(quantity):
        norm = math.hypot(norm, float(torch.linalg.vector_norm(quantity.fetch(box))))
    return norm / math.sqrt(max(1, math.prod(quantity.shape)))
