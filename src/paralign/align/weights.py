"""Tensors that a model can be filled with, wherever they come from: by name, box by box.

Files are safetensors; nothing is unpickled. A file may hold whole tensors, or, as torch's
distributed checkpoint writes them, shards that say where they lie in the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from paralign.align.pair import Moment, Quantity, Side
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError, TraceError
from paralign.layout import Box

_SHARDS = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


class Weights(Protocol):
    """Whole tensors by name, of which any part can be read."""

    @property
    def where(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor there is."""
        ...

    def choose(self, names: Collection[str]) -> Weights:
        """Return what is to be read into tensors of these names: these weights, as a rule."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, in the dtype it is stored in."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor."""
    start = (0,) * len(shape)
    return Box(start, start, tuple(shape))


class TraceWeights:
    """The parameters of a trace before its first step."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._reader = TraceReader(path)
        side = Side(self._reader)
        moments = [moment for moment in side.moments() if moment.kind == Kind.PARAM]
        if not moments:
            raise TraceError(f"{path}: it has no initial parameters. Record it with 'params'.")
        self._quantities: dict[str, Quantity] = {}
        problems = []
        for name in side.names(Moment.of(moments[0].step, Kind.PARAM)):
            quantity = side.quantity(moments[0], name)
            assert quantity is not None, "a listed name has a quantity"
            self._quantities[name] = quantity
            problems += [f"{name!r}: {problem}" for problem in quantity.problems]
        if problems:
            raise ConfigError.from_problems(f"{path} does not hold whole tensors", problems)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(q.shape) for name, q in self._quantities.items()
        }

    def choose(self, names: Collection[str]) -> Weights:
        """Return these weights."""
        return self

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor, in fp64."""
        return self._quantities[name].fetch(box)

    def close(self) -> None:
        """Unmap the payloads."""
        self._reader.close()


class _Piece(NamedTuple):
    """A stored box of a tensor."""

    file: Any
    box: Box


class FileWeights:
    """Tensors in safetensors files, each of them whole or in shards.

    Args:
        paths: The files, one at least.
        where: What messages call them; None: the first one.
        leave_out: Names that start so are not looked at.

    Attributes:
        codes: The dtype of every tensor, as the format calls it: ``F32``, ``BF16``, ...

    Raises:
        TraceError: One of them is no such file, or the shards of a tensor leave a gap.
    """

    def __init__(
        self, paths: Sequence[Path], *, where: str | None = None, leave_out: str | None = None
    ) -> None:
        self.where = str(paths[0]) if where is None else where
        self._pieces: dict[str, list[_Piece]] = {}
        self.codes: dict[str, str] = {}
        for path in paths:
            self._add(path, leave_out)
        ends = {
            name: [[a + n for a, n in zip(p.box.start, p.box.shape, strict=True)] for p in pieces]
            for name, pieces in self._pieces.items()
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(max(end) for end in zip(*found, strict=True))
            for name, found in ends.items()
        }
        gaps = [
            name
            for name, pieces in self._pieces.items()
            if sum(piece.box.numel for piece in pieces) != math.prod(self.shapes[name])
        ]
        if gaps:
            raise TraceError(
                f"{self.where}: a part of {', '.join(map(repr, gaps[:3]))} is missing or there "
                f"twice ({len(gaps)} tensors). Are all files there, and of one checkpoint?"
            )

    def _add(self, path: Path, leave_out: str | None) -> None:
        try:
            file = safe_open(str(path), framework="pt", device="cpu")
            said = json.loads((file.metadata() or {}).get(_SHARDS, "{}"))
            for name in file.keys():
                if leave_out is not None and name.startswith(leave_out):
                    continue
                view = file.get_slice(name)
                shape = tuple(view.get_shape())
                self.codes[name] = view.get_dtype()
                start = tuple(said[name][_OFFSETS]) if name in said else (0,) * len(shape)
                piece = _Piece(file, Box((0,) * len(shape), start, shape))
                known = self._pieces.setdefault(name, [])
                if all(other.box != piece.box for other in known):
                    known.append(piece)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{path}: not a safetensors file ({error}). Save the weights with "
                "safetensors.torch.save_file, or give a trace folder."
            ) from error

    def choose(self, names: Collection[str]) -> Weights:
        """Return these weights."""
        return self

    def read(self, name: str, box: Box) -> Tensor:
        """Return a part of a tensor."""
        pieces = self._pieces[name]
        if len(pieces) == 1:
            return _stored(pieces[0], name, box)
        wanted = Box((0,) * len(box.shape), box.start, box.shape)
        found = [(piece, wanted.intersect(piece.box)) for piece in pieces]
        parts = [(both[0], _stored(piece, name, both[1])) for piece, both in found if both]
        if len(parts) == 1:
            return parts[0][1]
        target = parts[0][1].new_empty(box.shape)
        for here, part in parts:
            target[here.local_slices] = part
        return target

    def close(self) -> None:
        """Let go of the files: each is unmapped with the last tensor that was read from it."""
        self._pieces.clear()


def _stored(piece: _Piece, name: str, box: Box) -> Tensor:
    """Return the values of ``box``, which lies in ``piece``."""
    part: Tensor
    if box.numel == piece.box.numel:
        part = piece.file.get_tensor(name)
        return part.reshape(box.shape)
    inside = zip(box.start, piece.box.start, box.shape, strict=True)
    part = piece.file.get_slice(name)[tuple(slice(a - b, a - b + n) for a, b, n in inside)]
    return part
