"""Read a trace folder: check that it is whole, then hand out parts of its tensors.

Reading a box reads that box, not its file. A folder that is truncated, mixed up or not a trace is a
``TraceError`` that names the file.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from paralign.align.lens import Lens, row_major
from paralign.align.payload import Payload, Scratch
from paralign.align.trace import (
    DTYPE_CODES,
    FACTS,
    FORMAT,
    VERSION,
    Facts,
    RankIndex,
    TensorEntry,
    rank_stem,
)
from paralign.errors import TraceError
from paralign.layout import Box

_MAX_OPEN_FILES = 64


class TraceReader:
    """A complete trace. Use it as a context manager, or call :meth:`close`.

    Args:
        directory: The trace folder.

    Raises:
        TraceError: The folder is not a trace, or a file is missing, truncated or from another
            trace.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._open: OrderedDict[str, Payload] = OrderedDict()
        self._lock = Lock()  # a payload has one position, and may be closed for another
        if not self.directory.is_dir():
            raise TraceError(
                f"{self.directory}: there is no such folder. Give the folder that pa.record wrote."
            )
        self.facts = self._read_facts()
        self.ranks = [self._read_rank(rank) for rank in range(self.facts.world_size)]
        self._check_no_other_ranks()

    @property
    def world_size(self) -> int:
        """Number of ranks that recorded."""
        return self.facts.world_size

    def read(
        self,
        entry: TensorEntry,
        box: Box,
        lens: Lens | None = None,
        scratch: Scratch | None = None,
    ) -> Tensor:
        """Return the part ``box`` of a recorded piece, in the dtype it was recorded in.

        Args:
            entry: The piece.
            box: The part; its ``local`` counts from where the piece begins, or the lens.
            lens: How the stored tensor is seen; None: as it is.
            scratch: Memory to read into.

        Raises:
            TraceError: The payload is damaged or does not fit its index.
        """
        if entry.file is None or entry.key is None:
            return torch.zeros(box.shape, dtype=getattr(torch, entry.dtype))
        with self._lock:
            file = self._payload(entry.file)
            try:
                code, shape = file.describe(entry.key)
                if (shape, code) != (entry.held_shape, DTYPE_CODES[entry.dtype]):
                    raise TraceError(
                        f"{self.directory / entry.file}: {entry.key!r} is {code} {list(shape)}, "
                        f"but the index says {DTYPE_CODES[entry.dtype]} {list(entry.held_shape)}. "
                        "The files are mixed up; record again."
                    )
                if lens is None:
                    lens = Lens(0, row_major(shape))
                return file.read(entry.key, lens.window(box), scratch)
            except (ValueError, OSError) as error:
                raise self._damaged(self.directory / entry.file, str(error)) from error

    def close(self) -> None:
        """Close all payloads."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _read_facts(self) -> Facts:
        path = self.directory / FACTS
        if not path.exists():
            if any(self.directory.glob("rank?????.*")):
                raise TraceError(
                    f"{path}: missing, so rank 0 did not finish recording. Let the run reach "
                    "rec.stop(), or the end of its recorded steps, on every rank."
                )
            raise TraceError(f"{path}: missing, so {self.directory} is not a trace.")
        data = self._read_json(path)
        try:
            facts = Facts.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(path, _say(error)) from error
        if facts.world_size < 1:
            raise self._damaged(path, f"world_size={facts.world_size}")
        return facts

    def _read_rank(self, rank: int) -> RankIndex:
        path = self.directory / f"{rank_stem(rank)}.json"
        if not path.exists():
            raise TraceError(
                f"{path}: missing, so rank {rank} of {self.facts.world_size} did not finish "
                "recording, or its files were left on another machine. Bring all ranks' files into "
                "one folder."
            )
        data = self._read_json(path)
        try:
            index = RankIndex.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(path, _say(error)) from error
        facts = self.facts
        if index.rank != rank:
            raise TraceError(
                f"{path}: it is the index of rank {index.rank}, under the name of rank {rank}. The "
                "files are mixed up; record again."
            )
        if (index.trace_id, index.world_size) != (facts.trace_id, facts.world_size):
            raise TraceError(
                f"{path}: it belongs to trace {index.trace_id} of {index.world_size} ranks, but "
                f"{FACTS} to trace {facts.trace_id} of {facts.world_size}. Two recordings are "
                "mixed; record again into an empty folder."
            )
        if index.steps != facts.steps:
            raise TraceError(
                f"{path}: rank {rank} recorded the steps {index.steps}, but rank 0 recorded "
                f"{facts.steps}. The run was truncated; record again."
            )
        self._check_files(path, index)
        return index

    def _check_files(self, path: Path, index: RankIndex) -> None:
        for name, size in index.files.items():
            payload = self.directory / name
            if payload.name != name or not name.startswith(rank_stem(index.rank)):
                raise self._damaged(path, f"it names the file {name!r}")
            if not payload.exists():
                raise TraceError(f"{payload}: missing, though {path.name} lists it. Record again.")
            if payload.stat().st_size != size:
                raise TraceError(
                    f"{payload}: it has {payload.stat().st_size} bytes, but {path.name} says "
                    f"{size}. It was truncated or replaced; record again."
                )
        for entry in index.tensors:
            if entry.file is not None and entry.file not in index.files:
                raise self._damaged(
                    path, f"{entry.key!r} is in {entry.file!r}, not listed in files"
                )

    def _check_no_other_ranks(self) -> None:
        for path in sorted(self.directory.glob("rank?????.*")):
            number = path.name[4:9]
            if number.isdigit() and int(number) >= self.facts.world_size:
                raise TraceError(
                    f"{path}: it is of rank {int(number)}, but {FACTS} counts "
                    f"{self.facts.world_size} ranks. Two recordings are mixed; record again into "
                    "an empty folder."
                )

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise self._damaged(path, str(error)) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise TraceError(
                f'{path}: it does not say "format": "{FORMAT}", so it is not a trace\'s.'
            )
        if data.get("version") != VERSION:
            raise TraceError(
                f"{path}: format version {data.get('version')!r}, but this paralign reads "
                f"{VERSION}. Record and compare with the same paralign."
            )
        return data

    def _payload(self, name: str) -> Payload:
        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.directory / name
        try:
            file = Payload(path)
        except (ValueError, OSError) as error:
            raise self._damaged(path, str(error)) from error
        metadata = file.metadata
        if metadata.get("trace_id") != self.facts.trace_id or metadata.get("file") != name:
            file.close()
            raise TraceError(
                f"{path}: it was written as {metadata.get('file')!r} of trace "
                f"{metadata.get('trace_id')!r}, not of {self.facts.trace_id!r}. The files are "
                "mixed up; record again."
            )
        self._open[name] = file
        if len(self._open) > _MAX_OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        return file

    @staticmethod
    def _damaged(path: Path, why: str) -> TraceError:
        return TraceError(f"{path}: damaged or not written by pa.record ({why}). Record again.")


def _say(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
