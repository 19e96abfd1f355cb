"""Counts what one rank sends: calls and bytes of every collective and of point-to-point messages.

Watches torch's dispatcher, where every call ends up whichever Python function made it: those of
FSDP, of the pipeline's schedule and of an attention exchange alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# They move nothing: waiting for a collective, and a barrier, which the measurement itself uses.
SILENT = ("wait_tensor", "barrier", "monitored_barrier_")


Traffic = dict[str, tuple[int, int]]  # kind -> calls, bytes


class TrafficCounter(TorchDispatchMode):
    """Counts between ``with`` and its end.

    Bytes, for ``n`` ranks in the group: what this rank's tensors take that go to another rank (an
    all-to-all: without the piece a rank keeps; an all-gather: its own shard ``n - 1`` times; a
    reduce-scatter: the ``n - 1`` pieces of others); for an all-reduce the tensor once.

    Raises:
        NotImplementedError: A kind of collective that it does not know, rather than miss its bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic: Traffic = {}

    def traffic(self) -> Traffic:
        """Return what this rank has sent, kind by kind."""
        return dict(sorted(self._traffic.items()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count ``func`` if it communicates, and run it."""
        if any(kind is DTensor for kind in types):
            return NotImplemented  # the DTensor comes back here with its local operations
        if func.namespace in NAMESPACES:
            self._count(func.__name__.split(".")[0], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, kwargs: Any) -> None:
        if name in SILENT:
            return
        measure = _KINDS.get(name)
        if measure is None:
            raise NotImplementedError(f"the bytes of collective {name!r} are not known here")
        kind, num_bytes = measure(args)
        calls, total = self._traffic.get(kind, (0, 0))
        self._traffic[kind] = (calls + 1, total + num_bytes)


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _others(args: Any, index: int = 2) -> int:
    return int(ProcessGroup.unbox(args[index]).size()) - 1


def _all_to_all(args: Any) -> tuple[str, int]:
    _, send, group, _, split_sizes = args[:5]
    size, rank = ProcessGroup.unbox(group).size(), ProcessGroup.unbox(group).rank()
    # A group of one rank sends itself nothing.
    kept = split_sizes[rank] / max(1, sum(split_sizes)) if split_sizes else 1 / size
    return "all-to-all", round(_bytes(send) * (1 - kept))


_KINDS: dict[str, Callable[[Any], tuple[str, int]]] = {
    "_allgather_base_": lambda args: ("all-gather", _bytes(args[1]) * _others(args)),
    "allgather_": lambda args: ("all-gather", _bytes(args[1]) * _others(args)),
    "_reduce_scatter_base_": lambda args: ("reduce-scatter", _bytes(args[0]) * _others(args)),
    "allreduce_": lambda args: ("all-reduce", _bytes(args[0])),
    "broadcast_": lambda args: ("broadcast", _bytes(args[0])),
    "alltoall_base_": _all_to_all,
    "send": lambda args: ("send", _bytes(args[0])),
    "recv_": lambda args: ("receive", _bytes(args[0])),
}
