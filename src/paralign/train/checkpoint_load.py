"""Loads a checkpoint into a run on any mesh, after a look at whether it is whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from paralign.errors import TrainingError
from paralign.train.checkpoint import Checkpoint, damaged, reason, seal_of


def load(checkpoint: Checkpoint, *parts: Mapping[str, Tensor]) -> None:
    """Fill this rank's tensors in place from a checkpoint of any mesh.

    Args:
        checkpoint: A complete one.
        parts: Tensors by global name; several where a rank has two of one name, one after another.
            As many on every rank.

    Comm:
        The plan, as when saving; each rank reads what it needs from disk.

    Raises:
        TrainingError: A file is missing, truncated or changed, or a tensor is not in it.
    """
    verify(checkpoint)
    reader = _Reader(str(checkpoint.path))
    found = _all_of([problem for part in parts for problem in _differences(reader, part)])
    if found:
        lines = [f"  - {problem}" for problem in dict.fromkeys(found)]
        raise TrainingError("\n".join([f"{checkpoint.path} is not of this model:", *lines]))
    for part in parts:
        load_shards(dict(part), storage_reader=reader)


def verify(checkpoint: Checkpoint, *, alone: bool = False) -> None:
    """Compare every file with the size and checksum it was written with; ranks share the files.

    Args:
        checkpoint: A complete one.
        alone: This process does all of it.

    Raises:
        TrainingError: One is missing or differs; every rank raises.
    """
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    listed = sorted(checkpoint.state()["files"].items())
    problems = []
    for name, (num_bytes, checksum) in listed[rank::world_size]:
        try:
            found_bytes, found_checksum = seal_of(checkpoint.path / name)
            if found_bytes != num_bytes:
                problems.append(f"{name} has {found_bytes} bytes instead of {num_bytes}")
            elif found_checksum != checksum:
                problems.append(f"{name} has changed since it was written")
        except OSError as error:
            problems.append(f"{name} cannot be read: {reason(error)}")
    if found := problems if alone else _all_of(problems):
        raise TrainingError(damaged(checkpoint.path, "; ".join(found)))


class _Reader(HuggingFaceStorageReader):
    """Reads the headers of all files once, though it is asked several times."""

    @cached_property
    def _metadata(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self) -> Metadata:
        return self._metadata


def _all_of(problems: list[str]) -> list[str]:
    """Return the problems of all ranks, so that all raise or none does."""
    everyone: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, problems)
    return [problem for one in everyone for problem in one]


def _differences(reader: _Reader, tensors: Mapping[str, Tensor]) -> list[str]:
    try:
        saved = reader.read_metadata().state_dict_metadata
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        return [f"its files cannot be read: {reason(error)}"]
    # The other kind of entry, pickled bytes, is not in these files.
    sizes = {n: list(m.size) for n, m in saved.items() if isinstance(m, TensorStorageMetadata)}
    problems = [f"{name} is not in it" for name in tensors if name not in sizes]
    return problems + [
        f"{name} has the shape {list(tensor.shape)} here and {sizes[name]} there"
        for name, tensor in tensors.items()
        if name in sizes and sizes[name] != list(tensor.shape)
    ]
