"""Traces for inspection, made from plain tensors: whole runs, and what ranks were fed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from paralign.align.inspect import InspectReport, inspect
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.trace import Facts, RankIndex, ScalarEntry, TokenMap
from paralign.align.trace_writer import TraceWriter, prepare_folder
from paralign.align.verdict import Finding
from paralign.layout import whole
from tests.align.synthetic import toy_step, write_trace

MESH = {"dp": 2, "cp": 2}


def sharded(name: str) -> Any:
    """The embedding is cut over dp, everything else is on every rank."""
    return (Shard(0), Replicate()) if name == "embed.weight" else (Replicate(), Replicate())


def norm_of(step: Mapping[tuple[str, str], Tensor | None]) -> float:
    return math.hypot(
        *(float(t.norm()) for (kind, _), t in step.items() if kind == Kind.GRAD and t is not None)
    )


def look(
    folder: Path, steps: Sequence[Mapping[tuple[str, str], Tensor | None]], **options: Any
) -> InspectReport:
    """Write a run on two by two ranks and inspect it."""
    keywords = {"mesh": MESH, "placements": sharded, "norm": norm_of(steps[0]), **options}
    unused = keywords.pop("unused", ())
    write_trace(folder, steps, **keywords)
    return inspect(folder, unused=unused)


def only(report: InspectReport) -> Finding:
    """Return the one finding."""
    assert len(report.findings) == 1, [finding.fix for finding in report.findings]
    assert report.exit_status == 1
    return report.findings[0]


def on(
    ranks: set[int], kind: str, name: str, edit: Callable[[Tensor], Tensor]
) -> Callable[[int, TensorEntry, Tensor], Tensor]:
    """Return a ``change`` for :func:`write_trace` that edits one tensor on some ranks."""

    def change(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        hit = rank in ranks and entry.kind == kind and name in (entry.name, "*")
        return edit(local) if hit else local

    return change


def plain_step() -> dict[tuple[str, str], Tensor]:
    return toy_step()


Fed = Mapping[str, Tensor]


def feed_trace(
    folder: Path,
    mesh: Mapping[str, int],
    fed: Callable[[dict[str, int]], Sequence[Fed]],
    *,
    samples: Callable[[dict[str, int]], Sequence[tuple[int, ...]]] | None = None,
    facts: Mapping[str, Any] | None = None,
    losses: Callable[[dict[str, int]], Sequence[ScalarEntry]] = lambda at: (),
) -> InspectReport:
    """Write what each rank was fed, by its coordinate, and inspect it.

    Args:
        fed: Coordinate -> per micro-batch its tokens, labels and positions.
        samples: Coordinate -> per micro-batch the sample numbers of its rows.
    """
    prepare_folder(folder, rank=0, clear_all=True)
    sizes = tuple(mesh.values())
    coordinates = list(itertools.product(*(range(size) for size in sizes)))
    rank_of = {coordinate: rank for rank, coordinate in enumerate(coordinates)}
    for coordinate, rank in rank_of.items():
        index = RankIndex(rank, math.prod(sizes), "id", steps=[0])
        index.coordinates = dict(zip(mesh, coordinate, strict=True))
        index.axes = {
            axis: [rank_of[(*coordinate[:dim], at, *coordinate[dim + 1 :])] for at in range(size)]
            for dim, (axis, size) in enumerate(mesh.items())
        }
        index.scalars = list(losses(index.coordinates))
        if samples is not None:
            index.token_maps = [
                TokenMap(0, number, rows) for number, rows in enumerate(samples(index.coordinates))
            ]
        writer = TraceWriter(folder, index)
        items = [
            (_input(name, tensor, number), tensor.contiguous())
            for number, given in enumerate(fed(index.coordinates))
            for name, tensor in given.items()
        ]
        writer.write("step0.activations0", items)
        known = Facts("id", math.prod(sizes), [0], ["inputs"], {}, dict(facts or {}))
        writer.finish(known if rank == 0 else None)
    return inspect(folder)


def _input(name: str, tensor: Tensor, micro_batch: int) -> TensorEntry:
    return TensorEntry(
        kind=Kind.INPUT,
        name=name,
        step=0,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        map=whole(tensor.shape),
        micro_batch=micro_batch,
        token_dims=(0, 1),
    )


def batch(rows: int = 4, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return tokens, and labels shifted over the whole row, the last one ignored."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 90, (rows, length), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((rows, 1), -100)], dim=1)
    return tokens, labels
