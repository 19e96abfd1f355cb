"""Serves global batches of real text as byte tokens, the same on every rank, read where needed.

The files of a source are cut into rows, each of ``seq_len`` neighbouring tokens of one file::

    bytes of a file   t0 t1 t2 t3 t4 t5 t6 t7 t8 t9       seq_len = 4
    row 0   tokens    t0 t1 t2 t3      labels  t1 t2 t3 t4
    row 1   tokens    t4 t5 t6 t7      labels  t5 t6 t7 t8
    row 2   tokens    t8 t9  0  0      labels  t9  -  -  -     (-: ignored)

Rows are numbered file after file, in the order of :class:`paralign.data.corpus.Corpus`. Serving
takes every row once an epoch, in strides over the whole source: the n-th row served is number
``(offset + stride * n) % num_rows``, where the seed and the epoch choose ``offset`` and ``stride``
(which has no common divisor with ``num_rows``). Only file *lengths* are looked up at the start; a
batch reads its own rows and nothing else.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from paralign.data.corpus import Corpus, find_corpus
from paralign.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

NUM_BYTES = 256  # the vocabulary of the byte tokenizer
IGNORED = -100  # a label that counts for nothing; paralign.loss.IGNORE_INDEX, without torch


def check_length(corpus: Corpus, *, seq_len: int, num_rows: int) -> None:
    """Check that ``corpus`` is enough for one batch without a row twice.

    Raises:
        DataError: It makes fewer than ``num_rows`` rows of ``seq_len`` tokens.
    """
    found = sum(_rows_in(size, seq_len) for size in corpus.num_bytes)
    if found < num_rows:
        raise DataError(
            f"data.source={corpus.name!r} holds {sum(corpus.num_bytes)} bytes in "
            f"{_count(len(corpus.files), 'file')}, which makes {_count(found, 'row')} of "
            f"seq_len={seq_len}, fewer than global_batch={num_rows}. "
            "Give a longer text, or use a smaller global_batch or seq_len."
        )


class TokenSource:
    """Byte tokens of a text, as global batches that depend only on (source, seed, step).

    Args:
        source: ``stdlib``, or the path of a text file or folder.
        global_batch: Rows of a batch, over all ranks and micro-batches.
        seq_len: Tokens of a row.
        seed: Chooses the order of rows and the padding.
        padding: Largest share of a row whose tail is masked. The share is drawn for each row, so
            that micro-batches and ranks hold different numbers of valid tokens.

    Raises:
        DataError: The source is missing, unreadable, empty or too short, or an argument is out of
            range.
    """

    def __init__(
        self,
        source: str,
        *,
        global_batch: int,
        seq_len: int,
        seed: int = 0,
        padding: float = 0.0,
    ) -> None:
        problems = [
            f"{name}={value} must be at least 1"
            for name, value in (("global_batch", global_batch), ("seq_len", seq_len))
            if value < 1
        ]
        if not 0 <= padding < 1:
            problems.append(f"padding={padding} must be at least 0 and below 1")
        if problems:
            raise DataError.from_problems("cannot serve batches", problems)
        self.corpus = find_corpus(source)
        check_length(self.corpus, seq_len=seq_len, num_rows=global_batch)
        self.num_rows_per_batch, self.seq_len = global_batch, seq_len
        self.seed, self.padding = seed, padding

    @cached_property
    def _row_ends(self) -> list[int]:
        """Number of rows in each file and all files before it."""
        return list(accumulate(_rows_in(size, self.seq_len) for size in self.corpus.num_bytes))

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self._row_ends[-1]

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """Return the whole batch of ``step``, the same on every rank that sees the same files.

        Returns:
            ``tokens`` and ``labels``, each ``[global_batch, seq_len]`` int64 on the CPU. Labels are
            already shifted: the label of a token is the one after it, also across the end of the
            row, and -100 where there is none or the tail is masked.

        Raises:
            DataError: A file has changed or become unreadable since the start.
        """
        import torch

        shape = (self.num_rows_per_batch, self.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        for index in range(self.num_rows_per_batch):
            served = step * self.num_rows_per_batch + index
            text = torch.frombuffer(bytearray(self._read_row(served)), dtype=torch.uint8)
            num_tokens = min(len(text), self.seq_len)
            tokens[index, :num_tokens] = text[:num_tokens].long()
            labels[index, : len(text) - 1] = text[1:].long()
            if tail := self._masked_tail(served):
                tokens[index, -tail:] = 0
                labels[index, -tail:] = IGNORED
        return {"tokens": tokens, "labels": labels}

    def _read_row(self, served: int) -> bytes:
        """Return the tokens of the ``served``-th row and, where there is one, the token after."""
        row = self._row_number(served)
        file = bisect_right(self._row_ends, row)
        start = (row - (self._row_ends[file - 1] if file else 0)) * self.seq_len
        count = min(self.seq_len + 1, self.corpus.num_bytes[file] - start)
        return self.corpus.read(file, start, count)

    def _row_number(self, served: int) -> int:
        epoch, place = divmod(served, self.num_rows)
        offset = _draw(self.num_rows, self.seed, "offset", epoch)
        stride = 1 + _draw(self.num_rows, self.seed, "stride", epoch)
        while math.gcd(stride, self.num_rows) != 1:  # 1 and num_rows + 1 always end the search
            stride += 1
        return (offset + stride * place) % self.num_rows

    def _masked_tail(self, served: int) -> int:
        longest = int(self.padding * self.seq_len)
        return _draw(longest + 1, self.seed, "padding", served) if longest else 0


def _rows_in(num_bytes: int, seq_len: int) -> int:
    """Count rows with at least one label: the last byte of a file is only a label."""
    return -(-(num_bytes - 1) // seq_len)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}"


def _draw(below: int, *key: int | str) -> int:
    """Return a number in ``range(below)`` that depends only on ``key``, on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "big") % below
