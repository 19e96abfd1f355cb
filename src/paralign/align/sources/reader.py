"""What a source reader knows: where a plain local tensor belongs, and where its values are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """How one mesh axis cuts a dim; read like a placement of torch's."""

    dim: int
    split_factor: int = 1
    """The dim was first cut into so many parts, and every rank holds its share of each."""


@dataclass(frozen=True)
class Reader:
    """How to read the parameters of one library."""

    name: str
    knows: Callable[[Any], bool]
    """Whether a parameter is one of that library's."""
    cuts: Callable[[Any], Mapping[str, Any]]
    """Mesh axis -> placement, for parameters that are local pieces as plain tensors."""
    value: Callable[[Any], Tensor | None]
    """The parameter's values; None where another rank gives them."""
    gradient: Callable[[Any], Tensor | None]
    """The gradient that the optimizer is about to use; None if there is none."""
    state: Callable[[Sequence[Any], Any], list[tuple[str, Any]]]
    """What the optimizers hold of a parameter, as ``(name, value)``."""
    owned: Callable[[Sequence[Any], Any], tuple[int, int] | None]
    """Range of elements whose gradient this rank has; None: all of them."""
    gathers: bool = False
    """Whether values, gradients and states are put together from all ranks of a data-parallel
    group, so that one of them writes what all of them get."""
