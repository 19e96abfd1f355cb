"""Rows of tokens, by number, and how some of them become a batch.

A row is ``seq_len`` neighbouring tokens, with the token that each one should predict::

    bytes of a file   t0 t1 t2 t3 t4 t5 t6 t7 t8 t9       seq_len = 4
    row 0   tokens    t0 t1 t2 t3      labels  t1 t2 t3 t4
    row 1   tokens    t4 t5 t6 t7      labels  t5 t6 t7 t8
    row 2   tokens    t8 t9  0  0      labels  t9  -  -  -     (-: ignored)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Protocol

from paralign.data.corpus import Corpus
from paralign.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

NUM_BYTES = 256  # the vocabulary of the byte tokenizer
IGNORED = -100  # a label that counts for nothing; paralign.loss.IGNORE_INDEX, without torch


class Row(NamedTuple):
    """The tokens of a row, ``n <= seq_len`` of them.

    Attributes:
        tokens: ``[n]`` int64.
        labels: ``[n]`` int64, already shifted; ``IGNORED`` where nothing is to be predicted.
        documents: ``[n]`` int64, which document of the row a token is of, counted from 0; None:
            attention may cross documents.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None = None


class Rows(Protocol):
    """Rows that can be read by number."""

    @property
    def seq_len(self) -> int:
        """Tokens of a full row."""
        ...

    @property
    def num_rows(self) -> int:
        """How many there are."""
        ...

    @property
    def name(self) -> str:
        """Where they come from, for messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal on every machine that has the same rows."""
        ...

    def read(self, number: int) -> Row:
        """Read one."""
        ...


class ByteRows:
    """The bytes of files: rows file after file, each file beginning one.

    Raises:
        DataError: A file has changed or become unreadable, when a row is read.
    """

    def __init__(self, corpus: Corpus, *, seq_len: int) -> None:
        self._corpus, self._seq_len = corpus, seq_len
        # Rows in each file and all files before it.
        self._ends = list(accumulate(rows_in(size, seq_len) for size in corpus.num_bytes))

    @property
    def seq_len(self) -> int:
        """See :class:`Rows`."""
        return self._seq_len

    @property
    def num_rows(self) -> int:
        """See :class:`Rows`."""
        return self._ends[-1]

    @property
    def name(self) -> str:
        """See :class:`Rows`."""
        return self._corpus.label

    @property
    def fingerprint(self) -> str:
        """See :class:`Rows`."""
        return self._corpus.fingerprint

    def read(self, number: int) -> Row:
        """See :class:`Rows`."""
        import torch

        file = bisect_right(self._ends, number)
        start = (number - (self._ends[file - 1] if file else 0)) * self._seq_len
        count = min(self._seq_len + 1, self._corpus.num_bytes[file] - start)
        read = bytearray(self._corpus.read(file, start, count))
        text = torch.frombuffer(read, dtype=torch.uint8).long()
        labels = torch.full((min(count, self._seq_len),), IGNORED, dtype=torch.int64)
        labels[: count - 1] = text[1:]
        return Row(text[: self._seq_len], labels)


class PartOfRows:
    """Neighbouring rows: what is trained on, or what is held out.

    Args:
        rows: All rows.
        first: Number of the first one that belongs to the part.
        num_rows: How many do.
    """

    def __init__(self, rows: Rows, first: int, num_rows: int) -> None:
        self._rows, self._first, self._num_rows = rows, first, num_rows

    @property
    def seq_len(self) -> int:
        """See :class:`Rows`."""
        return self._rows.seq_len

    @property
    def num_rows(self) -> int:
        """See :class:`Rows`."""
        return self._num_rows

    @property
    def name(self) -> str:
        """See :class:`Rows`."""
        return self._rows.name

    @property
    def fingerprint(self) -> str:
        """See :class:`Rows`."""
        last = self._first + self._num_rows
        return f"{self._rows.fingerprint}[{self._first}:{last}]"

    def read(self, number: int) -> Row:
        """See :class:`Rows`."""
        return self._rows.read(self._first + number)


def split_rows(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Cut the last ``share`` of the rows off: at least one, and never all.

    Returns:
        The rows to train on, and those that are held out.

    Raises:
        DataError: There is only one row.
    """
    held_out = num_held_out(rows.num_rows, share)
    kept = rows.num_rows - held_out
    if kept < 1:
        raise DataError(
            f"{rows.name} makes {count_of(rows.num_rows, 'row')} of seq_len={rows.seq_len}, and "
            f"validation.share={share} leaves none of them to train on. Use a smaller share, give "
            "validation.source, or a longer text."
        )
    return PartOfRows(rows, 0, kept), PartOfRows(rows, kept, held_out)


def num_held_out(num_rows: int, share: float) -> int:
    """Return how many of so many rows are held out."""
    return max(1, round(num_rows * share))


def batch_of(rows: Sequence[Row | None], seq_len: int) -> dict[str, Tensor]:
    """Put rows below each other; None is a row without anything to predict.

    Returns:
        ``tokens`` and ``labels``, each ``[rows, seq_len]`` int64 on the CPU; ``documents`` as well
        where rows have them. What lies behind a row's end is token 0, ignored, and in a document
        of its own.
    """
    import torch

    shape = (len(rows), seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    documents = torch.zeros(shape, dtype=torch.int64)
    is_isolated = False
    for index, row in enumerate(rows):
        if row is None:
            continue
        num_tokens = len(row.tokens)
        tokens[index, :num_tokens] = row.tokens
        labels[index, :num_tokens] = row.labels
        if row.documents is not None:
            is_isolated = True
            documents[index, :num_tokens] = row.documents
            documents[index, num_tokens:] = row.documents[-1] + 1
    batch = {"tokens": tokens, "labels": labels}
    return batch | {"documents": documents} if is_isolated else batch


def rows_in(num_tokens: int, seq_len: int) -> int:
    """Count the rows of a text with at least one label: its last token is only a label."""
    return -(-(num_tokens - 1) // seq_len)


def count_of(number: int, word: str) -> str:
    """Return a number of things in words."""
    return f"{number} {word}{'s' if number > 1 else ''}"
