"""Counts what a rank sends, by collective and axis: the measure that ``check`` is held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paralign.mesh import FOLDS, MESH_AXES, degrees_of, expert_mesh, fold

Counts = dict[tuple[str, str], tuple[int, int]]  # (collective, axis) -> calls, bytes sent

KINDS = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "send": "send",
}
SILENT = {"recv_", "barrier", "monitored_barrier_"}


class Counter(TorchDispatchMode):
    """Counts what this rank sends, at torch's dispatcher, which every collective passes."""

    def __init__(self, axes: Mapping[tuple[int, ...], str]) -> None:
        super().__init__()
        self.axes = axes
        self.counts: Counts = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            self.count(func.__name__.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def count(self, name: str, args: Any) -> None:
        if name in SILENT:
            return
        ranks = next(ranks_of(args))
        degree = len(ranks)
        sizes = [sum(x.numel() * x.element_size() for x in tensors(arg)) for arg in args]
        # The largest tensor is the whole one: gathered, about to be scattered, or reduced.
        share = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(KINDS[name])
        sent = max(sizes) if share is None else share * max(sizes) * (degree - 1) // degree
        if name == "alltoall_base_":
            sent = leaving(args, ranks.index(dist.get_rank()), degree)
        key = KINDS[name], self.axes.get(ranks, str(ranks))
        calls, total = self.counts.get(key, (0, 0))
        self.counts[key] = (calls + 1, total + sent)


def leaving(args: Any, me: int, degree: int) -> int:
    """Return the bytes of an all-to-all's input that are not for the rank itself."""
    _, given, _, _, splits, *_ = args
    rows = given.shape[0]
    own = splits[me] if splits else rows // degree
    return int(given.element_size() * (given.numel() // max(1, rows)) * (rows - own))


def tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def ranks_of(args: Any) -> Iterator[tuple[int, ...]]:
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(leaf)
            except RuntimeError:
                continue  # the kind of reduction
            yield tuple(dist.get_process_group_ranks(group))


def axes_of(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Return ranks of a group -> what ``check`` calls it."""
    degrees = degrees_of(mesh)
    groups = {str(axis): mesh[str(axis)] for axis in MESH_AXES}
    for view, axes in FOLDS.items():
        name = " x ".join(str(axis) for axis in axes if degrees.degree(axis) > 1)
        groups.setdefault(name or str(view), fold(mesh, view))
    if degrees.spreads_experts:
        groups |= {axis: expert_mesh(mesh)[axis] for axis in ("efsdp", "ep")}
    names: dict[tuple[int, ...], str] = {}
    for name, group in groups.items():
        names.setdefault(tuple(dist.get_process_group_ranks(group.get_group())), name)
    names[tuple(range(mesh.size()))] = "world"
    return names
