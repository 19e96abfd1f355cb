"""Plain torch: values and gradients are where torch puts them; DTensors say where they belong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paralign.align.sources.reader import Reader


def _knows(parameter: Any) -> bool:
    return isinstance(parameter, Tensor)


def _no_cuts(parameter: Any) -> dict[str, Any]:
    return {}


def _value(parameter: Any) -> Tensor | None:
    value: Tensor = parameter
    return value


def _gradient(parameter: Any) -> Tensor | None:
    gradient: Tensor | None = parameter.grad
    return gradient


def state_of(optimizers: Sequence[Any], parameter: Any) -> list[tuple[str, Any]]:
    """Return what torch optimizers hold of ``parameter``."""
    found: list[tuple[str, Any]] = []
    for optimizer in optimizers:
        states = getattr(optimizer, "state", None)
        if isinstance(states, Mapping) and parameter in states:
            found += states[parameter].items()
    return found


def owns_all(optimizers: Sequence[Any], parameter: Any) -> tuple[int, int] | None:
    """Say that the rank has the whole local gradient."""
    return None


TORCH = Reader("torch", _knows, _no_cuts, _value, _gradient, state_of, owns_all)
