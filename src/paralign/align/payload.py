"""Read parts of the tensors in a safetensors file, by position.

The file is read, not mapped: mapped pages count as this process's memory for as long as nobody
else wants it, and a comparison touches every page of every trace.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paralign.align.lens import Window, row_major
from paralign.align.tensor_entry import DTYPE_CODES

_DTYPES = {code: getattr(torch, name) for name, code in DTYPE_CODES.items()}
_MOST_HEADER_BYTES = 1 << 28
# Reading what lies between two rows is cheaper than a call per row, up to this many times the rows.
_MOST_WASTE = 4
_SMALL_BYTES = 1 << 16


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    code: str
    shape: tuple[int, ...]
    begin: int
    """Position of its first byte in the file."""


class Scratch:
    """Memory that is used again: asking the system for fresh pages costs more than reading does.

    What is read into it lasts until the next read into it.
    """

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return ``count`` elements of no particular value."""
        held = self._held.get(dtype)
        if held is None or held.numel() < count:
            held = self._held[dtype] = torch.empty(count, dtype=dtype)
        return held[:count]


class Payload:
    """An open safetensors file.

    Args:
        path: The file.

    Raises:
        ValueError: It is not a safetensors file, or its header does not fit its size.
        OSError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        try:
            self._tensors, self.metadata = _read_header(self._file, path.stat().st_size)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def describe(self, key: str) -> tuple[str, tuple[int, ...]]:
        """Return the dtype code and shape of a tensor.

        Raises:
            ValueError: There is no such tensor.
        """
        stored = self._stored(key)
        return stored.code, stored.shape

    def read(
        self, key: str, window: Window | None = None, scratch: Scratch | None = None
    ) -> Tensor:
        """Return a tensor, or the part that ``window`` sees, in its own memory or ``scratch``.

        Raises:
            ValueError: There is no such tensor, it is shorter than the window, or the file ends.
        """
        stored = self._stored(key)
        if window is None:
            window = Window(0, stored.shape, row_major(stored.shape))
        if not window.numel:
            return torch.empty(window.shape, dtype=stored.dtype)
        if window.offset < 0 or window.offset + window.reach > math.prod(stored.shape):
            raise ValueError(f"{key!r} has {list(stored.shape)} elements, too few for {window}")
        return self._read(stored, window, scratch)

    def _read(self, stored: _Stored, window: Window, scratch: Scratch | None) -> Tensor:
        most = max(_MOST_WASTE * window.numel, _SMALL_BYTES // stored.dtype.itemsize)
        if window.reach <= most:
            flat = self._read_flat(stored, window.offset, window.reach, scratch)
            return flat.as_strided(window.shape, window.strides)
        dim, rows = window.rows()
        return torch.cat([self._read(stored, row, None) for row in rows], dim)

    def _read_flat(
        self, stored: _Stored, first: int, count: int, scratch: Scratch | None
    ) -> Tensor:
        if scratch is None:
            tensor = torch.empty(count, dtype=stored.dtype)
        else:
            tensor = scratch.take(stored.dtype, count)
        size = count * stored.dtype.itemsize
        target = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        self._file.seek(stored.begin + first * stored.dtype.itemsize)
        done = 0
        while done < size:  # one call reads at most 2 GiB
            got = self._file.readinto(target[done:])
            if not got:
                raise ValueError("the file ends before its data does")
            done += got
        return tensor

    def _stored(self, key: str) -> _Stored:
        if key not in self._tensors:
            raise ValueError(f"it holds no tensor {key!r}")
        return self._tensors[key]


def _read_header(file: Any, size: int) -> tuple[dict[str, _Stored], dict[str, str]]:
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError("its header is cut off")
    header = json.loads(file.read(length).decode("utf-8"))
    if not isinstance(header, dict):
        raise ValueError("its header is no table")
    metadata = header.pop("__metadata__", {})
    try:
        tensors = {key: _stored(key, item, 8 + length, size) for key, item in header.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"its header is not one of safetensors: {error}") from error
    return tensors, metadata if isinstance(metadata, dict) else {}


def _stored(key: str, item: Any, data: int, size: int) -> _Stored:
    code, shape = item["dtype"], tuple(int(n) for n in item["shape"])
    begin, end = item["data_offsets"]
    if code not in _DTYPES:
        raise ValueError(f"{key!r} has the unknown dtype {code!r}")
    dtype = _DTYPES[code]
    if (
        min(shape, default=0) < 0
        or not 0 <= begin <= end <= size - data
        or end - begin != math.prod(shape) * dtype.itemsize
    ):
        raise ValueError(f"{key!r} lies at {begin}:{end}, which does not fit {code} {list(shape)}")
    return _Stored(dtype, code, shape, data + begin)
