"""Write one rank's part of a trace: payload files one by one, then the index, then the facts.

A payload is an ordinary safetensors file, but written tensor by tensor: recording needs memory for
one local tensor, and none where tensors are contiguous on the host already.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from paralign.align.trace import (
    DTYPE_CODES,
    FACTS,
    Facts,
    RankIndex,
    ScalarEntry,
    TensorEntry,
    rank_stem,
)
from paralign.errors import TraceError

_OWN_FILE = re.compile(r"rank(\d{5})(\.[\w.-]+)?\.(json|safetensors)(\.tmp)?|facts\.json(\.tmp)?")


class TraceWriter:
    """Collect one rank's tensors and scalars and write them to a folder.

    Args:
        directory: The trace folder, shared by all ranks or one per machine.
        index: What is known of the rank; gains the entries and files that are written.
    """

    def __init__(self, directory: Path, index: RankIndex) -> None:
        self.directory = directory
        self.index = index

    def write(self, label: str, tensors: Sequence[tuple[TensorEntry, Tensor | None]]) -> None:
        """Write the tensors of one moment of the run into a file of their own.

        Args:
            label: What the file holds, as part of its name: ``step0.grad``.
            tensors: Entries without ``file`` and ``key``, each with its local tensor, or None where
                there is none.
        """
        name = f"{rank_stem(self.index.rank)}.{label}.safetensors"
        payload: dict[str, Tensor] = {}
        keys: dict[int, str] = {}
        for entry, tensor in tensors:
            if tensor is None:
                self.index.tensors.append(entry)
                continue
            # What several entries share (a module that returns what its last part did) is written
            # once.
            if id(tensor) not in keys:
                keys[id(tensor)] = _free_key(entry, payload)
                payload[keys[id(tensor)]] = tensor
            self.index.tensors.append(replace(entry, file=name, key=keys[id(tensor)]))
        if payload:
            metadata = {"trace_id": self.index.trace_id, "file": name}
            size = write_payload(self.directory / name, list(payload.items()), metadata)
            self.index.files[name] = size

    def scalar(self, entry: ScalarEntry) -> None:
        """Note one reported number."""
        self.index.scalars.append(entry)

    def finish(self, facts: Facts | None) -> None:
        """Write the index, which makes this rank's part complete; then, on rank 0, the facts."""
        path = self.directory / f"{rank_stem(self.index.rank)}.json"
        write_json(path, self.index.to_json(), indent=None)  # may have thousands of entries
        if facts is not None:
            write_json(self.directory / FACTS, facts.to_json())


def prepare_folder(directory: Path, *, rank: int, clear_all: bool) -> None:
    """Make an empty trace folder: remove an earlier trace, refuse anything else.

    Args:
        directory: The folder; made if it does not exist.
        rank: Whose files to remove.
        clear_all: Remove every rank's files (rank 0 does, before the others write).

    Raises:
        TraceError: The folder holds files that are no part of a trace, or is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise TraceError(f"directory={str(directory)!r} is a file. Name a folder for the trace.")
    directory.mkdir(parents=True, exist_ok=True)
    matches = {path: _OWN_FILE.fullmatch(path.name) for path in directory.iterdir()}
    foreign = sorted(path.name for path, match in matches.items() if not match)
    if foreign:
        raise TraceError(
            f"directory={str(directory)!r} holds {foreign[0]!r}, which is no part of a trace. "
            "Record into an empty folder."
        )
    for path, match in matches.items():
        if clear_all or (match and match.group(1) == f"{rank:05d}"):
            path.unlink(missing_ok=True)


def write_payload(
    path: Path, tensors: Sequence[tuple[str, Tensor]], metadata: dict[str, str]
) -> int:
    """Write a safetensors file, one tensor in memory at a time; return its size in bytes.

    Raises:
        TraceError: A dtype has no place in a safetensors file.
    """
    # Wide types first: then every tensor starts at a multiple of its own item size.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key, tensor in ordered:
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPE_CODES[dtype_name(tensor.dtype, key)],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            write_data(file, tensor)
    temporary.replace(path)
    return 8 + len(text) + at


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write ``content`` so that the file is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=indent, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def dtype_name(dtype: torch.dtype, tensor: str) -> str:
    """Return torch's name of ``dtype`` without its module.

    Raises:
        TraceError: A trace cannot hold this dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_CODES:
        raise TraceError(
            f"{tensor!r} has dtype={name}, which a trace cannot hold. It can hold "
            f"{', '.join(DTYPE_CODES)}."
        )
    return name


def write_data(file: IO[bytes], tensor: Tensor) -> None:
    """Write the bytes of a tensor, in row-major order."""
    if math.prod(tensor.shape) == 0:
        return
    host = tensor.detach().contiguous().cpu()
    # The bytes of the tensor's own memory, without a copy and without NumPy.
    size = host.numel() * host.element_size()
    file.write((ctypes.c_char * size).from_address(host.data_ptr()))


def _free_key(entry: TensorEntry, used: Container[str]) -> str:
    """Name a tensor in its file; copies of one parameter (tied) differ by a number only."""
    key = ":".join(part for part in (entry.kind, entry.state, entry.name) if part)
    if entry.micro_batch is not None:
        key = f"{key}@{entry.micro_batch}"
    number = 0
    free = key
    while free in used:
        number += 1
        free = f"{key}#{number}"
    return free
