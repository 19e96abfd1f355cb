"""Megatron: attributes on parameters say which dim is cut over tp, and where gradients collect.

``tensor_model_parallel``, ``partition_dim`` and ``partition_stride`` are set by its parallel
layers; ``main_grad`` by its DistributedDataParallel, which leaves ``.grad`` empty. With the
distributed optimizer a rank has the reduced gradient only of the range that it steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from paralign.align.sources.reader import Cut, Reader
from paralign.align.sources.torch_tensors import state_of

_AXES = {
    "pp": "get_pipeline_model_parallel_group",
    "dp": "get_data_parallel_group",
    "cp": "get_context_parallel_group",
    "tp": "get_tensor_model_parallel_group",
}


def groups() -> dict[str, Any] | None:
    """Return Megatron's process group per mesh axis, if it has made them in this process."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return {axis: getattr(state, getter)() for axis, getter in _AXES.items()}


def norm_of_step(result: Any) -> float | None:
    """Return the norm that ``optimizer.step()`` has clipped by, from what it returned."""
    if isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], bool):
        return None if result[1] is None else float(result[1])
    return None


def marks(parameters: Iterable[Any]) -> bool:
    """Say whether one of ``parameters`` is Megatron's."""
    return any(_knows(parameter) for parameter in parameters)


def _knows(parameter: Any) -> bool:
    return hasattr(parameter, "tensor_model_parallel") or hasattr(parameter, "main_grad")


def _cuts(parameter: Any) -> dict[str, Cut]:
    if not getattr(parameter, "tensor_model_parallel", False):
        return {}
    return {"tp": Cut(parameter.partition_dim, getattr(parameter, "partition_stride", 1))}


def _value(parameter: Any) -> Tensor | None:
    value: Tensor = parameter
    return value


def _gradient(parameter: Any) -> Tensor | None:
    gradient: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if gradient is None else gradient


def _owned(optimizers: Sequence[Any], parameter: Any) -> tuple[int, int] | None:
    for optimizer in optimizers:
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            if parameter in getattr(inner, "model_param_gbuf_map", {}):
                owned = inner._get_model_param_range_map(parameter)["param"]
                return owned.start, owned.end
            if hasattr(inner, "model_param_gbuf_map") and parameter.requires_grad:
                held = getattr(inner, "buffers", None)
                if held is not None and any(parameter in b.param_to_bucket for b in held):
                    return 0, 0  # another rank of the group steps it
    return None


def _state(optimizers: Sequence[Any], parameter: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for optimizer in optimizers:
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            # Its optimizers wrap torch's, which steps a copy in fp32, or this rank's range of it.
            base = getattr(inner, "optimizer", inner)
            stepped = getattr(parameter, "main_param", None)
            found += state_of([base], parameter if stepped is None else stepped)
    return found


MEGATRON = Reader("megatron", _knows, _cuts, _value, _gradient, _state, _owned)
