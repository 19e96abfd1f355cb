"""DeepSpeed: its functions put values, gradients and optimizer state together from all ranks.

They communicate, so every rank of a data-parallel group asks for every parameter, in the same
order. They are looked up in the DeepSpeed that the run has imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paralign.align.sources.reader import Reader
from paralign.align.sources.torch_tensors import owns_all, state_of

_STATES = ("exp_avg", "exp_avg_sq")


def is_between_micro_batches(optimizer: Any) -> bool:
    """Say whether a ``step()`` of DeepSpeed's engine will only count a micro-batch."""
    boundary = getattr(optimizer, "is_gradient_accumulation_boundary", None)
    return callable(boundary) and not boundary()


def norm_of_step(optimizer: Any) -> float | None:
    """Return the norm that the engine's ``step()`` has clipped by."""
    norm = getattr(optimizer, "get_global_grad_norm", None)
    value = norm() if callable(norm) else None
    return None if value is None else float(value)


def _functions() -> Any:
    return sys.modules.get("deepspeed.utils")


def _knows(parameter: Any) -> bool:
    marked = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")
    return marked and _functions() is not None


def _no_cuts(parameter: Any) -> dict[str, Any]:
    return {}


def _value(parameter: Any) -> Tensor | None:
    if not hasattr(parameter, "ds_id"):  # ZeRO-1 and -2 keep the parameter whole
        whole: Tensor = parameter
        return whole
    value: Tensor | None = _functions().safe_get_full_fp32_param(parameter)
    return value


def _gradient(parameter: Any) -> Tensor | None:
    if not parameter.requires_grad:
        return None
    gradient: Tensor | None = _functions().safe_get_full_grad(parameter)
    return gradient


def _state(optimizers: Sequence[Any], parameter: Any) -> list[tuple[str, Any]]:
    if not parameter.requires_grad:
        return []
    get = _functions().safe_get_full_optimizer_state
    found = [(name, get(parameter, name)) for name in _STATES]
    return [item for item in found if item[1] is not None] or state_of(optimizers, parameter)


DEEPSPEED = Reader("deepspeed", _knows, _no_cuts, _value, _gradient, _state, owns_all, gathers=True)
