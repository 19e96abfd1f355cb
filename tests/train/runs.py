"""Small training runs on ranks, and what their checkpoints hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paralign.config.run import RunConfig
from paralign.launch import run_ranks
from paralign.train.checkpoint import Checkpoint, find_checkpoints
from paralign.train.loop import Ended, run_local_rank
from tests.parity import make_config


def training_config(folder: Path, **sections: Any) -> RunConfig:
    """Return a run of some seconds; ``sections`` change keys of it."""
    base: dict[str, dict[str, Any]] = {
        "pipeline": {"schedule": "GPipe", "num_microbatches": 2},
        "batch": {"global_batch": 8, "seq_len": 16},
        "data": {"padding": 0.25},
        "precision": {"compute": "float64", "reduce": "float64"},
        "optimizer": {"lr": 3e-3, "clip": 0.5, "decay": "matrices"},
        "schedule": {"warmup_steps": 2},
        "train": {"steps": 4, "dir": str(folder), "log_every": 1},
    }
    for name, changes in sections.items():
        base[name] = base.get(name, {}) | changes
    return make_config(**base)


def run(config: RunConfig, **options: Any) -> tuple[list[Ended], list[str]]:
    """Train on as many ranks as the mesh has; return how each ended, and what was said."""
    said: list[str] = []
    ends = run_ranks(
        run_local_rank,
        config.mesh.degrees.world_size,
        config,
        describe=config.mesh.degrees.describe_rank,
        timeout=120,
        on_event=lambda rank, text: said.append(text),
        **options,
    )
    return ends, said


def newest(config: RunConfig) -> Checkpoint:
    """Return the last complete checkpoint of a run."""
    return find_checkpoints(Path(config.train.dir) / "checkpoints")[-1]


def tensors_in(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, whole, put together from where shards say they lie."""
    tensors: dict[str, Tensor] = {}
    found: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(checkpoint.path.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                at = places[name]["saved_offsets"]
                found.setdefault(name, []).append((at, file.get_tensor(name)))
    for name, pieces in found.items():
        ends = [[a + n for a, n in zip(at, p.shape, strict=True)] for at, p in pieces]
        shape = [max(end) for end in zip(*ends, strict=True)]
        tensors[name] = torch.full(shape, torch.nan, dtype=pieces[0][1].dtype)
        for offsets, piece in pieces:
            part = tensors[name]
            for dim, (start, size) in enumerate(zip(offsets, piece.shape, strict=True)):
                part = part.narrow(dim, start, size)
            part.copy_(piece)
    return tensors


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest relative Frobenius error of a tensor; NaN where one has NaN."""
    assert ours.keys() == theirs.keys()
    errors = [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in ((ours[name], theirs[name]) for name in ours)
    ]
    return max(errors, key=lambda error: float("inf") if error != error else error)
