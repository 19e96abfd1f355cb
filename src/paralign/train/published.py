"""Checkpoints of ours as published models, and published models as seed checkpoints of ours.

Tensor by tensor: neither way holds more than one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralign.align.payload_stream import FILE_BYTES
from paralign.align.weights import Weights, whole_box
from paralign.config.run import ModelSection, RunConfig
from paralign.errors import ConfigError
from paralign.models.published import Layout
from paralign.train.checkpoint import FORMAT, Checkpoint, seal_of
from paralign.train.checkpoint_load import verify
from paralign.train.seed import seed_state
from paralign.train.tensor_files import check_new, new_folder, write_durably, write_tensors
from paralign.weights.folders import (
    CONFIG_FILE,
    STATE_FILE,
    described_by,
    find_place,
    read_published,
    read_state,
)
from paralign.weights.initial import open_weights
from paralign.weights.published import INDEX, PublishedWeights
from paralign.weights.translate import Translated

_STEP = "step-00000000"


def export_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> str:
    """Write a checkpoint's weights as a published model.

    Args:
        source: A checkpoint, a seed checkpoint, or the folder of a run: its newest one.
        out: The new folder; it has its name when all is in it.
        dtype: Of the tensors; None: as they were saved. Router biases do not become narrower than
            they are.
        file_bytes: A file that has become larger is followed by another.

    Returns:
        What has been written, in words.

    Raises:
        ConfigError: ``source`` is no checkpoint, its model has something that the published form
            cannot say (all of it is listed), or ``out`` exists or cannot be written.
        TrainingError: The checkpoint is damaged.
    """
    check_new(out)
    place = find_place(source)
    if place.kind != "checkpoint":
        raise ConfigError(
            f"{source} is no checkpoint. Give a folder that `paralign train` has written: that of "
            "a run, or step-... in its checkpoints."
        )
    state = read_state(place.path)
    found = described_by(place.path, state)
    if found is None:
        raise ConfigError(
            f"{place.path} is of a model of your own, whose published form paralign does not know. "
            "Its files are safetensors under the model's own names."
        )
    published = found.entry.published
    if problems := published.cannot_write(found.config):
        title = f"{place.path}: the published form cannot say what this {found.entry.name} computes"
        raise ConfigError.from_problems(title, problems)
    verify(Checkpoint(place.path, int(state["step"])), alone=True)
    layout = published.layout(found.config, (), {})
    weights = open_weights(place)
    try:
        _check_complete(place.path, weights, layout)
        entries = published.write(found.config)
        # Not of the model: how far it has been trained to look.
        entries["max_position_embeddings"] = int(state["config"]["batch"]["seq_len"])
        with new_folder(out) as folder:
            written = _write_published(
                folder, Translated(weights, layout, to="theirs"), layout, dtype, file_bytes
            )
            entries["torch_dtype"] = str(written["dtype"]).removeprefix("torch.")
            write_durably(
                folder / CONFIG_FILE, json.dumps(entries, indent=2, sort_keys=True) + "\n"
            )
    finally:
        weights.close()
    return (
        f"{entries['architectures'][0]}, step {state['step']}, {len(layout.theirs)} tensors, "
        f"{entries['torch_dtype']}"
    )


def _write_published(
    folder: Path, weights: Weights, layout: Layout, dtype: torch.dtype | None, file_bytes: int
) -> dict[str, Any]:
    """Write tensors and index; return the dtype of most of them."""
    dtypes: list[torch.dtype] = []
    num_bytes = 0

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_bytes
        for name, shape in layout.theirs.items():
            tensor = weights.read(name, whole_box(shape))
            if name not in layout.stays_float32:
                tensor = tensor.to(dtype or tensor.dtype)
                dtypes.append(tensor.dtype)
            elif dtype is not None:
                tensor = tensor.to(torch.promote_types(dtype, tensor.dtype))
            num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    placed = write_tensors(folder, tensors(), file_bytes=file_bytes)
    if len(set(placed.values())) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": placed}
        write_durably(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return {"dtype": max(set(dtypes), key=dtypes.count)}


def _check_complete(path: Path, weights: Weights, layout: Layout) -> None:
    ours, there = layout.ours, weights.shapes
    problems = [f"{name} is not in it" for name in ours if name not in there]
    problems += [f"{name} is not of this model" for name in sorted(set(there) - set(ours))]
    problems += [
        f"{name} is {list(there[name])}, not {list(shape)}"
        for name, shape in ours.items()
        if there.get(name, shape) != shape
    ]
    if problems:
        raise ConfigError.from_problems(f"{path} does not have the tensors of its model", problems)


def import_published(source: Path, out: Path) -> RunConfig:
    """Write a published model as a seed checkpoint, ``out/step-00000000``.

    Args:
        source: The folder with ``config.json`` and safetensors.
        out: The new folder; it has its name when all is in it.

    Returns:
        A run of that model which starts from it; the caller may write it down.

    Raises:
        ConfigError: The model is not one that paralign can compute, or its tensors are not exactly
            those that it needs; all problems are listed. Or ``out`` exists or cannot be written.
    """
    check_new(out)
    place = find_place(source)
    if place.kind != "published":
        raise ConfigError(f"{source} has no {CONFIG_FILE}. Give the folder of a published model.")
    found = read_published(place.path)
    sizes: Mapping[str, Any] = {
        "name": found.entry.name,
        **asdict(found.config),
    }
    weights = PublishedWeights(place.path).as_ours()
    try:
        with new_folder(out) as folder:
            checkpoint = folder / _STEP
            checkpoint.mkdir()
            shapes = weights.shapes.items()
            tensors = ((name, weights.read(name, whole_box(shape))) for name, shape in shapes)
            files = sorted(set(write_tensors(checkpoint, tensors).values()))
            state = {
                "format": FORMAT,
                "torch": torch.__version__,
                "step": 0,
                **seed_state(RunConfig(model=ModelSection.model_validate(sizes))),
                "files": {name: seal_of(checkpoint / name) for name in files},
            }
            write_durably(checkpoint / STATE_FILE, json.dumps(state, indent=1))
    finally:
        weights.close()
    return RunConfig(model=ModelSection.model_validate({**sizes, "start_from": str(out)}))
