"""What an optimizer is: its class and the options of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

# Options that choose a kernel, not a result.
_KERNEL_OPTIONS = ("params", "foreach", "fused", "capturable", "differentiable", "initial_lr")


def describe_optimizer(optimizer: Any, names: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return the class and the options of each group, with the names of its parameters."""
    groups = []
    for group in getattr(optimizer, "param_groups", []):
        options = {key: _plain(value) for key, value in group.items() if key not in _KERNEL_OPTIONS}
        members = [name for p in group["params"] for name in names.get(id(p), ())]
        groups.append({"options": options, "names": members})
    return {"class": type(optimizer).__name__, "groups": groups}


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
