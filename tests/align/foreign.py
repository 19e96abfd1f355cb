"""Runs whose tensors have other names, shapes and ranks than the reference's, for pairing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralign.align import Report, compare
from paralign.align.trace import Facts, Kind, RankIndex, TensorEntry
from paralign.align.trace_writer import TraceWriter, prepare_folder
from paralign.layout import whole
from tests.align.judging import check_schema

Weights = dict[str, Tensor]


def decoder(num_layers: int = 4, *, seed: int = 0, vocab: int = 11, width: int = 8) -> Weights:
    """Return weights of a small decoder, norms and biases constant."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = {"embed.weight": draw(vocab, width)}
    for layer in range(num_layers):
        prefix = f"layers.{layer}."
        weights |= {
            prefix + "attention_norm.weight": torch.ones(width, dtype=torch.float64),
            prefix + "attn.wq.weight": draw(width, width),
            prefix + "attn.wq.bias": torch.zeros(width, dtype=torch.float64),
            prefix + "attn.wk.weight": draw(width // 2, width),
            prefix + "attn.wk.bias": torch.zeros(width // 2, dtype=torch.float64),
            prefix + "attn.wv.weight": draw(width // 2, width),
            prefix + "attn.wv.bias": torch.zeros(width // 2, dtype=torch.float64),
            prefix + "attn.wo.weight": draw(width, width),
            prefix + "ffn_norm.weight": torch.ones(width, dtype=torch.float64),
            prefix + "mlp.up.weight": draw(12, width),
            prefix + "mlp.down.weight": draw(width, 12),
        }
    return weights | {
        "norm.weight": torch.ones(width, dtype=torch.float64),
        "head.weight": draw(vocab, width),
    }


def gradients_of(weights: Weights) -> Weights:
    """Return a gradient for each weight; the same for the same name."""
    return {
        name: torch.randn(
            weight.shape,
            generator=torch.Generator().manual_seed(sum(name.encode()) * 7 + len(name)),
            dtype=weight.dtype,
        )
        for name, weight in weights.items()
    }


Rank = Sequence[Mapping[str, Tensor | None]]
"""Per kind what a rank holds, own name -> local tensor: parameters, then gradients."""


def write_ranks(
    directory: Path,
    ranks: Sequence[Rank],
    *,
    axes: Mapping[str, Sequence[Sequence[int]]] | None = None,
    entries: Mapping[tuple[int, str], Mapping[str, Any]] | None = None,
    stages: Sequence[int] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a trace in which every rank records plain local tensors and knows nothing of others.

    Args:
        directory: Its folder.
        ranks: Per rank its parameters and gradients by own name.
        axes: Per axis its groups.
        entries: Per rank and own name, fields of its entries to replace (``name``, ``flat``...).
        stages: Per rank its pipeline stage.
    """
    prepare_folder(directory, rank=0, clear_all=True)
    what = ["params", "grads"]
    for rank, kinds in enumerate(ranks):
        index = RankIndex(rank, len(ranks), "id", steps=[0])
        for axis, groups in (axes or {}).items():
            group = next(list(group) for group in groups if rank in group)
            index.axes[axis] = group
            index.coordinates[axis] = group.index(rank)
        index.stages = None if stages is None else [stages[rank]]
        writer = TraceWriter(directory, index)
        for kind, tensors in zip((Kind.PARAM, Kind.GRAD), kinds, strict=True):
            items = []
            for own, local in tensors.items():
                shape = (1,) if local is None else tuple(local.shape)
                dtype = "float64" if local is None else str(local.dtype).removeprefix("torch.")
                entry = TensorEntry(kind, own, 0, dtype, shape, whole(shape))
                items.append((replace(entry, **(entries or {}).get((rank, own), {})), local))
            writer.write(f"step0.{kind}", items)
        run = {"compute_dtype": "float64", "train_dtype": "float64", **(facts or {})}
        known = Facts("id", len(ranks), [0], what, {"torch": "2"}, run)
        writer.finish(known if rank == 0 else None)
    return directory


def both(tmp_path: Path, ranks: Sequence[Rank], weights: Weights, **options: Any) -> Report:
    """Compare ranks with the whole ``weights`` and their gradients."""
    names = options.pop("names", None)
    write_ranks(tmp_path / "ref", [(weights, gradients_of(weights))])
    write_ranks(tmp_path / "par", ranks, **options)
    report = compare(tmp_path / "ref", tmp_path / "par", names=names)
    check_schema(report)
    return report
