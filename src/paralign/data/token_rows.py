"""Rows of a token file: every document a beginning of its own, or all packed without a gap.

::

    documents         a0 a1 a2 a3 a4 | b0 b1 b2       seq_len = 4

    DocumentRows      a0 a1 a2 a3   a4 has no label of its own: a3's is a4
                      b0 b1 b2  0
    PackedRows        a0 a1 a2 a3   labels  a1 a2 a3 a4
                      a4 b0 b1 b2           -  b1 b2 -      (-: the document has ended)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paralign.data.rows import IGNORED, Row, rows_in
from paralign.data.token_file import TokenFile
from paralign.errors import DataError


class _FileRows:
    """What rows of a token file have in common."""

    def __init__(self, file: TokenFile, *, seq_len: int) -> None:
        self._file, self._seq_len = file, seq_len

    @property
    def seq_len(self) -> int:
        """See :class:`paralign.data.rows.Rows`."""
        return self._seq_len

    @property
    def name(self) -> str:
        """See :class:`paralign.data.rows.Rows`."""
        return name_of(self._file)

    @property
    def fingerprint(self) -> str:
        """See :class:`paralign.data.rows.Rows`."""
        return self._file.fingerprint


class DocumentRows(_FileRows):
    """Each document begins a row, and its last row is filled up."""

    def __init__(self, file: TokenFile, *, seq_len: int) -> None:
        super().__init__(file, seq_len=seq_len)
        lengths = np.diff(file.ends, prepend=0)
        self._row_ends = np.cumsum(-(-(lengths - 1) // seq_len))

    @property
    def num_rows(self) -> int:
        """See :class:`paralign.data.rows.Rows`."""
        return int(self._row_ends[-1])

    def read(self, number: int) -> Row:
        """See :class:`paralign.data.rows.Rows`."""
        document = int(np.searchsorted(self._row_ends, number, side="right"))
        before = int(self._row_ends[document - 1]) if document else 0
        begin = int(self._file.ends[document - 1]) if document else 0
        start = begin + (number - before) * self._seq_len
        stop = min(start + self._seq_len + 1, int(self._file.ends[document]))
        text = _read(self._file, start, stop)
        num_tokens = min(len(text), self._seq_len)
        labels = np.full(num_tokens, IGNORED, dtype=np.int64)
        labels[: len(text) - 1] = text[1:]
        return Row(torch.from_numpy(text[:num_tokens]), torch.from_numpy(labels))


class PackedRows(_FileRows):
    """All documents one after another, cut every ``seq_len`` tokens.

    The last token of a document has no label: it does not predict the next document.

    Args:
        file: The tokens.
        seq_len: Tokens of a row; at least 2, since a row of one may have nothing to predict.
        isolate: Say which document each token is of, so that attention stays inside.
    """

    def __init__(self, file: TokenFile, *, seq_len: int, isolate: bool) -> None:
        if seq_len < 2:
            raise DataError(
                f"seq_len={seq_len} is too short to pack documents: a row may have nothing to "
                "predict. Use seq_len=2 or more, or data.packing=none."
            )
        super().__init__(file, seq_len=seq_len)
        self._isolate = isolate

    @property
    def num_rows(self) -> int:
        """See :class:`paralign.data.rows.Rows`."""
        return rows_in(self._file.header.num_tokens, self._seq_len)

    def read(self, number: int) -> Row:
        """See :class:`paralign.data.rows.Rows`."""
        start = number * self._seq_len
        stop = min(start + self._seq_len + 1, self._file.header.num_tokens)
        text, ends = _read(self._file, start, stop), self._file.ends
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop - 1, side="right"))
        here = np.asarray(ends[first:last])  # where a document ends before another one begins
        documents = np.searchsorted(here, np.arange(start, stop), side="right")
        num_tokens = min(len(text), self._seq_len)
        labels = np.full(num_tokens, IGNORED, dtype=np.int64)
        is_inside = documents[1:] == documents[:-1]
        labels[: len(text) - 1] = np.where(is_inside, text[1:], IGNORED)
        return Row(
            torch.from_numpy(text[:num_tokens]),
            torch.from_numpy(labels),
            torch.from_numpy(documents[:num_tokens].astype(np.int64)) if self._isolate else None,
        )


def name_of(file: TokenFile) -> str:
    """Return what messages call the source of a token file."""
    header = file.header
    return (
        f"data.source={header.source!r}, of {header.num_tokens} tokens in {header.num_documents} "
        "documents,"
    )


def _read(file: TokenFile, start: int, stop: int) -> NDArray[Any]:
    return np.asarray(file.tokens[start:stop], dtype=np.int64)
