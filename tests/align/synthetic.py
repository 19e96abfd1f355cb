"""Traces made from plain tensors, for tests that start no ranks: any mesh, any placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from paralign.align.trace import Facts, Kind, RankIndex, ScalarEntry, TensorEntry
from paralign.align.trace_writer import TraceWriter, prepare_folder
from paralign.layout import boxes, local_boxes, local_shape

Placements = Sequence[Any]


def cut(full: Tensor, local_map: Any) -> Tensor:
    """Return the local tensor that a map describes."""
    local = torch.zeros(local_shape(local_map), dtype=full.dtype)
    for box in boxes(local_map):
        region = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
        local[box.local_slices] = full[region]
    return local


def write_trace(
    directory: Path,
    steps: Sequence[Mapping[tuple[str, str], Tensor | None]],
    *,
    mesh: Mapping[str, int] | None = None,
    placements: Callable[[str], Placements] = lambda name: (),
    loss: float = 2.0,
    tokens: int = 10,
    norm: float | None = None,
    facts: Mapping[str, Any] | None = None,
    what: Sequence[str] = ("loss", "norm", "params", "grads", "optimizer"),
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    leave_out: Callable[[int, TensorEntry], bool] = lambda rank, entry: False,
    change: Callable[[int, TensorEntry, Tensor], Tensor] = lambda rank, entry, local: local,
    optimizers: Sequence[dict[str, Any]] = (),
    trace_id: str = "id",
) -> Path:
    """Write a complete trace.

    Args:
        directory: Its folder.
        steps: Per step ``(kind, name) -> global tensor``; a kind of ``moment:exp_avg`` names the
            state.
        mesh: Axis -> degree, the first varies slowest.
        placements: Of the tensor of that name, one per axis; () replicates over all.
        change: Edits the local tensor a rank writes; ``leave_out`` drops it.
    """
    mesh = dict(mesh or {})
    prepare_folder(directory, rank=0, clear_all=True)
    sizes = tuple(mesh.values())
    coordinates = list(itertools.product(*(range(size) for size in sizes)))
    rank_of = {coordinate: rank for rank, coordinate in enumerate(coordinates)}
    for coordinate, rank in rank_of.items():
        index = RankIndex(rank, math.prod(sizes), trace_id)
        index.coordinates = dict(zip(mesh, coordinate, strict=True))
        index.axes = {
            axis: [rank_of[(*coordinate[:dim], at, *coordinate[dim + 1 :])] for at in range(size)]
            for dim, (axis, size) in enumerate(mesh.items())
        }
        index.steps = list(range(len(steps)))
        index.optimizers = list(optimizers)
        writer = TraceWriter(directory, index)
        for step, tensors in enumerate(steps):
            written: dict[str, list[tuple[TensorEntry, Tensor | None]]] = {}
            for (kind, name), full in tensors.items():
                entry, local = _piece(kind, name, step, full, mesh, coordinate, placements(name))
                if aliases and name in aliases:
                    entry = TensorEntry(**{**vars(entry), "aliases": aliases[name]})
                if leave_out(rank, entry):
                    continue
                if local is not None:
                    local = change(rank, entry, local.clone())
                written.setdefault(kind, []).append((entry, local))
            for kind, items in written.items():
                writer.write(f"step{step}.{kind.replace(':', '.')}", items)
            writer.scalar(ScalarEntry("loss", step, loss, tokens))
            if norm is not None:
                writer.scalar(ScalarEntry("norm", step, norm))
        run = {"compute_dtype": "float64", **(facts or {})}
        known = Facts(trace_id, math.prod(sizes), index.steps, list(what), {"torch": "2"}, run)
        writer.finish(known if rank == 0 else None)
    return directory


def _piece(
    kind: str,
    name: str,
    step: int,
    full: Tensor | None,
    mesh: Mapping[str, int],
    coordinate: tuple[int, ...],
    placements: Placements,
) -> tuple[TensorEntry, Tensor | None]:
    placements = placements or tuple(Replicate() for _ in mesh)
    shape = (1,) if full is None else tuple(full.shape)
    local_map = local_boxes(shape, placements, tuple(mesh.values()), coordinate)
    kind, _, state = kind.partition(":")
    entry = TensorEntry(
        kind=kind,
        name=name,
        step=step,
        dtype="float64" if full is None else str(full.dtype).removeprefix("torch."),
        shape=shape,
        map=local_map,
        state=state or None,
        replicated_over=_axes(mesh, placements, Replicate),
        partial_over=_axes(mesh, placements, Partial),
    )
    return entry, None if full is None else cut(full, local_map)


def _axes(mesh: Mapping[str, int], placements: Placements, kind: type) -> tuple[str, ...]:
    return tuple(
        axis for axis, placement in zip(mesh, placements, strict=True) if type(placement) is kind
    )


def toy_step(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of one step of a model with three parameters, all that can be recorded."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[str, str], Tensor] = {}
    for name, shape in {"embed.weight": (7, 4), "layers.0.w": (4, 6), "norm.weight": (5,)}.items():

        def draw(shape: tuple[int, ...] = shape) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        param, grad = draw(), draw()
        tensors[Kind.PARAM, name] = param
        tensors[Kind.GRAD, name] = grad
        tensors["moment:exp_avg", name] = 0.1 * grad
        tensors[Kind.PARAM_AFTER, name] = param - 1e-3 * grad
    return tensors


def with_kind(
    tensors: Mapping[tuple[str, str], Tensor], kind: str, **new: Any
) -> dict[tuple[str, str], Any]:
    """Return ``tensors`` with some of one kind replaced: ``with_kind(t, "grad", **{"a.b": x})``."""
    return {**tensors, **{(kind, name): value for name, value in new.items()}}
