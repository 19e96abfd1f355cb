"""What an optimizer holds: the state of each parameter and the options of its group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paralign.align.placements import is_dtensor, local_of

# Options that choose a kernel, not a result.
_KERNEL_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


def parameter_state(
    optimizers: Sequence[Any], parameter: Tensor
) -> Iterator[tuple[str, Tensor | None, str]]:
    """Yield ``(state name, tensor, why)`` for every state of ``parameter``.

    ``tensor`` is None, and ``why`` says so, for a state whose part of the global tensor is not
    known.
    """
    local_shape = tuple(local_of(parameter).shape)
    for optimizer in optimizers:
        states = getattr(optimizer, "state", None)
        if not isinstance(states, Mapping) or parameter not in states:
            continue
        for name, value in states[parameter].items():
            if value is None:
                continue
            if isinstance(value, bool | int | float):
                yield name, torch.tensor(value), ""
            elif not isinstance(value, Tensor):
                yield name, None, f"the state is a {type(value).__name__}, not a tensor"
            elif is_dtensor(value) or value.dim() == 0 or tuple(value.shape) == local_shape:
                yield name, value, ""
            else:
                yield (
                    name,
                    None,
                    f"its shape {tuple(value.shape)} is not the parameter's, so what it is of the "
                    "whole is not known",
                )


def describe_optimizer(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the class and the options of each group, with the names of its parameters."""
    groups = []
    for group in getattr(optimizer, "param_groups", []):
        options = {key: _plain(value) for key, value in group.items() if key not in _KERNEL_OPTIONS}
        members = [names[id(p)] for p in group["params"] if id(p) in names]
        groups.append({"options": options, "names": members})
    return {"class": type(optimizer).__name__, "groups": groups}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
