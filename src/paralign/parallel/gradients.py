"""Sets aside the gradients that earlier steps left, where this step alone must be seen."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

Taken = list[tuple[nn.Parameter, Tensor]]


def take_gradients(parameters: Sequence[nn.Parameter]) -> Taken:
    """Take away and return the gradients that ``parameters`` have."""
    taken = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, _ in taken:
        parameter.grad = None
    return taken


def give_back(taken: Taken) -> None:
    """Add taken gradients to what has come since."""
    for parameter, grad in taken:
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
