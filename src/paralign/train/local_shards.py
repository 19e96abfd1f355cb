"""Element-wise work on the shards that a rank holds, without DTensor's dispatch of every operation.

An optimizer step is the same arithmetic for every element, whichever rank holds it. DTensor finds
that out again for each operation and each parameter, which for many small parameters takes longer
than the arithmetic. Here each operation is looked at once: if it is element-wise, it runs on the
local tensors; if its result would depend on how tensors are cut (a norm, a product of matrices, a
random number), it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from paralign.errors import LayoutError

# Element-wise, though the engine does not say so of them.
_ELEMENTWISE = frozenset(
    """
    _foreach_copy_ _foreach_zero_ _fused_adam_ _fused_adamw_ _fused_sgd_ _to_copy alias copy_ detach
    empty_like fill_ full_like ones_like zero_ zeros_like
    """.split()
)
_REDUCES = frozenset({"_foreach_max", "_foreach_norm"})


@contextmanager
def on_local_shards() -> Iterator[None]:
    """Run element-wise operations on DTensors directly on their local tensors.

    Inside, an operation whose DTensors are laid out alike, and whose result for an element depends
    on those elements alone, does no communication and skips DTensor's dispatch; what it returns is
    laid out alike as well. Everything else on DTensors is refused, as its result would depend on
    how they are cut. Plain tensors work as ever::

        with pa.on_local_shards():
            optimizer.step()  # AdamW, SGD and others that look at one element at a time

    Comm:
        none.

    Raises:
        LayoutError: An operation is not element-wise, mixes layouts, or has partial sums.
    """
    with _LocalShards():
        yield


class _LocalShards(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[Any, bool] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        if func not in self._known:
            self._known[func] = is_elementwise(func)
        if not self._known[func]:
            raise LayoutError(
                f"{func} inside on_local_shards: its result depends on how tensors are cut over "
                "ranks. Do it outside, where DTensor sums over ranks as it must."
            )
        lists = [value for value in args if _is_list(value)]
        length = len(lists[0]) if lists else 1
        rows = [_row(func, args, kwargs, index) for index in range(length)]
        out = func(*map(_local, args), **{name: _local(value) for name, value in kwargs.items()})
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            if out is not None:
                return written[0]
            # A list: the engine counts the changes of single tensors only.
            torch.autograd.graph.increment_version(written)
            return None
        if isinstance(out, (list, tuple)):
            return type(out)(_like(one, row) for one, row in zip(out, rows, strict=True))
        return _like(out, rows[0])


def is_elementwise(func: Any) -> bool:
    """Whether what an operator makes of an element depends on the same element of its inputs only.

    Args:
        func: An overload, such as ``torch.ops.aten.mul.Tensor``.
    """
    name = func._schema.name.partition("::")[2]
    if name in _ELEMENTWISE:
        return True
    if name in _REDUCES or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if name.startswith("_foreach_"):
        packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
        overloads = [] if packet is None else [getattr(packet, o) for o in packet.overloads()]
        return any(torch.Tag.pointwise in overload.tags for overload in overloads)
    return torch.Tag.pointwise in func.tags


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(one, Tensor) for one in value)


def _row(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], index: int) -> DTensor | None:
    """Return the DTensor that gives the ``index``-th result its layout, after a look at others."""
    tensors = [
        value[index] if _is_list(value) and index < len(value) else value
        for value in (*args, *kwargs.values())
    ]
    found = [value for value in tensors if isinstance(value, DTensor)]
    if not found:
        return None
    first = found[0]
    if any(placement.is_partial() for one in found for placement in one.placements):
        raise LayoutError(
            f"{func} inside on_local_shards: a tensor of shape {list(first.shape)} holds partial "
            "sums. Reduce it first, with redistribute."
        )
    for other in tensors:
        if isinstance(other, DTensor):
            is_alike = (other.shape, other.placements, other.device_mesh) == (
                first.shape,
                first.placements,
                first.device_mesh,
            )
        else:
            is_alike = not isinstance(other, Tensor) or other.dim() == 0
        if not is_alike:
            raise LayoutError(
                f"{func} inside on_local_shards: {_describe(first)} and {_describe(other)} are not "
                "cut alike, so their elements do not lie on the same ranks. Redistribute one."
            )
    return first


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return [value for value in found if isinstance(value, DTensor)]


def _describe(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"a tensor of shape {list(tensor.shape)} cut as {tensor.placements}"
    return f"a plain tensor of shape {list(tensor.shape)}"


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, (list, tuple)):
        return type(value)(_local(one) for one in value)
    return value


def _like(local: Any, row: DTensor | None) -> Any:
    if row is None or not isinstance(local, Tensor):
        return local
    return DTensor.from_local(
        local,
        row.device_mesh,
        row.placements,
        run_check=False,
        shape=row.shape,
        stride=row.stride(),
    )
