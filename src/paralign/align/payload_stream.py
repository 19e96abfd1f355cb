"""Write tensors into safetensors files as they come, without knowing what is still to come.

The header of such a file stands in front of its data. Room is reserved for it and what is left over
is filled with spaces, which the format allows; so a tensor is written once, from where it lies.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from paralign.align.tensor_entry import DTYPE_CODES
from paralign.align.trace_writer import dtype_name, write_data

HEADER_BYTES = 1 << 17
"""Room for the header: some 500 tensors."""

FILE_BYTES = 1 << 30
"""A file that has become larger is closed."""

_ENTRY_BYTES = 160  # dtype, shape, offsets and punctuation of one tensor, with room to spare


class PayloadStream:
    """One file while it is written.

    Args:
        path: The file; it is there, as a whole, after :meth:`close`.
        metadata: What its header says besides the tensors.
    """

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._header: dict[str, Any] = {"__metadata__": metadata}
        self._header_bytes = len(json.dumps(self._header))
        self._at = 0
        self._file: IO[bytes] = self._temporary.open("wb")
        self._file.seek(8 + HEADER_BYTES)

    def takes(self, key: str, tensor: Tensor) -> bool:
        """Whether the tensor fits: there is room, and it would begin at a multiple of its size."""
        entry = len(json.dumps(key)) + _ENTRY_BYTES + 20 * tensor.dim()
        return (
            self._header_bytes + entry <= HEADER_BYTES
            and self._at < FILE_BYTES
            and self._at % tensor.element_size() == 0
            and key not in self._header
        )

    def add(self, key: str, tensor: Tensor) -> None:
        """Write a tensor, whose bytes are final when this returns."""
        size = math.prod(tensor.shape) * tensor.element_size()
        self._header[key] = {
            "dtype": DTYPE_CODES[dtype_name(tensor.dtype, key)],
            "shape": list(tensor.shape),
            "data_offsets": [self._at, self._at + size],
        }
        self._header_bytes += len(json.dumps(key)) + _ENTRY_BYTES + 20 * tensor.dim()
        write_data(self._file, tensor)
        self._at += size

    def close(self) -> int:
        """Write the header, give the file its name and return its size in bytes."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (HEADER_BYTES - len(text))
        assert len(text) == HEADER_BYTES, "takes() has kept room for every entry"
        self._file.seek(0)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.close()
        self._temporary.replace(self.path)
        return 8 + HEADER_BYTES + self._at

    def abandon(self) -> None:
        """Remove what was written."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)
