"""Serves global batches of real text, the same ones on every rank and mesh, read where needed.

Which row comes when depends on the seed and the epoch, so the number of a batch is all that has to
be known to go on with a run, on any number of ranks. A batch reads its own rows and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paralign.data.corpus import Corpus, find_corpus
from paralign.data.order import Order, Strides, draw
from paralign.data.rows import (
    IGNORED,
    NUM_BYTES,
    ByteRows,
    Row,
    Rows,
    batch_of,
    count_of,
    num_held_out,
    rows_in,
)
from paralign.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORED", "NUM_BYTES", "HeldOut", "TokenSource", "byte_source", "check_length"]


def check_length(
    corpus: Corpus, *, seq_len: int, num_rows: int, held_out: float | None = None
) -> None:
    """Check that the bytes of ``corpus`` are enough for one batch without a row twice.

    Args:
        corpus: The files.
        seq_len: Tokens of a row.
        num_rows: Rows that are needed.
        held_out: Share of the rows that is not trained on; None: all are.

    Raises:
        DataError: They make fewer than ``num_rows`` rows of ``seq_len`` tokens.
    """
    found = sum(rows_in(size, seq_len) for size in corpus.num_bytes)
    kept = found if held_out is None else found - num_held_out(found, held_out)
    if found >= num_rows > kept:
        raise DataError(
            f"{corpus.label} makes {count_of(found, 'row')} of seq_len={seq_len}, of which "
            f"validation.share={held_out} holds out {found - kept}: {kept} are left, fewer than "
            f"global_batch={num_rows}. Use a smaller share, or give validation.source."
        )
    if found < num_rows:
        raise DataError(
            f"{corpus.label} holds {sum(corpus.num_bytes)} bytes in "
            f"{count_of(len(corpus.files), 'file')}, which makes {count_of(found, 'row')} of "
            f"seq_len={seq_len}, fewer than global_batch={num_rows}. "
            "Give a longer text, or use a smaller global_batch or seq_len."
        )


def byte_source(
    source: str, *, global_batch: int, seq_len: int, seed: int = 0, padding: float = 0.0
) -> TokenSource:
    """Serve the bytes of text files as they are, without a token file.

    Args:
        source: ``stdlib``, or the path of a text file or folder.
        global_batch: As for :class:`TokenSource`.
        seq_len: Tokens of a row.
        seed: As for :class:`TokenSource`.
        padding: As for :class:`TokenSource`.

    Raises:
        DataError: The source is missing, unreadable, empty or too short, or an argument is out of
            range.
    """
    _check(global_batch=global_batch, seq_len=seq_len, padding=padding)
    corpus = find_corpus(source)
    check_length(corpus, seq_len=seq_len, num_rows=global_batch)
    rows = ByteRows(corpus, seq_len=seq_len)
    return TokenSource(rows, global_batch=global_batch, seed=seed, padding=padding)


class TokenSource:
    """Rows as global batches that depend only on (rows, order, seed, step).

    Args:
        rows: What is served.
        global_batch: Rows of a batch, over all ranks and micro-batches.
        seed: Chooses the padding and, where none is given, the order of rows.
        padding: Largest share of a row whose tail is masked. The share is drawn for each row, so
            that micro-batches and ranks hold different numbers of valid tokens.
        order: Which row comes when; None: strides over all of them.

    Raises:
        DataError: There are fewer rows than a batch needs, or an argument is out of range.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        global_batch: int,
        seed: int = 0,
        padding: float = 0.0,
        order: Order | None = None,
    ) -> None:
        _check(global_batch=global_batch, seq_len=rows.seq_len, padding=padding)
        if rows.num_rows < global_batch:
            raise DataError(
                f"{rows.name} makes {count_of(rows.num_rows, 'row')} of seq_len={rows.seq_len} to "
                f"train on, fewer than global_batch={global_batch}. Give a longer text, or use a "
                "smaller global_batch or seq_len, or hold out fewer rows."
            )
        self._rows = rows
        self._order = Strides(rows.num_rows, seed=seed) if order is None else order
        self.num_rows_per_batch, self.seq_len = global_batch, rows.seq_len
        self.seed, self.padding = seed, padding

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return self._rows.num_rows

    @property
    def fingerprint(self) -> str:
        """Equal where the rows are the same: what a run must find again to go on."""
        return self._rows.fingerprint

    def global_batch(self, step: int) -> dict[str, Tensor]:
        """Return the whole batch of ``step``, the same on every rank that sees the same files.

        Returns:
            ``tokens`` and ``labels``, each ``[global_batch, seq_len]`` int64 on the CPU. Labels are
            already shifted: the label of a token is the one after it, also across the end of the
            row, and -100 where its document ends or the tail is masked. Where attention must not
            cross documents, ``documents`` as well: equal numbers for tokens of one document. And
            ``samples`` ``[global_batch]``: the rows' numbers in the order of the run.

        Raises:
            DataError: A file has changed or become unreadable since the start.
        """
        import torch

        first = step * self.num_rows_per_batch
        served = range(first, first + self.num_rows_per_batch)
        batch = batch_of([self._masked(number) for number in served], self.seq_len)
        return {**batch, "samples": torch.tensor(served)}

    def _masked(self, served: int) -> Row:
        """Return the ``served``-th row, without what its padding hides."""
        row = self._rows.read(self._order.row(served))
        tail = self._masked_tail(served)
        # Counted from the end of a full row: a short one has less to hide.
        kept = min(len(row.tokens), self.seq_len - tail)
        row.tokens[kept:] = 0
        row.labels[kept:] = IGNORED
        return row

    def _masked_tail(self, served: int) -> int:
        longest = int(self.padding * self.seq_len)
        return draw(longest + 1, self.seed, "padding", served) if longest else 0


class HeldOut:
    """Rows to validate on, in their own order; the last batch is filled up with empty rows.

    Args:
        rows: What is held out.
        global_batch: Rows of a batch.
        most: Most batches that are looked at; None: all.
    """

    def __init__(self, rows: Rows, *, global_batch: int, most: int | None = None) -> None:
        self._rows, self._global_batch = rows, global_batch
        whole = -(-rows.num_rows // global_batch)
        self.num_batches = whole if most is None else min(most, whole)

    @property
    def fingerprint(self) -> str:
        """Equal where the rows are the same."""
        return self._rows.fingerprint

    def global_batch(self, number: int) -> dict[str, Tensor]:
        """Return a batch, as :meth:`TokenSource.global_batch` does."""
        first = number * self._global_batch
        wanted = range(first, first + self._global_batch)
        rows = [self._rows.read(n) if n < self._rows.num_rows else None for n in wanted]
        return batch_of(rows, self._rows.seq_len)


def _check(*, global_batch: int, seq_len: int, padding: float) -> None:
    problems = [
        f"{name}={value} must be at least 1"
        for name, value in (("global_batch", global_batch), ("seq_len", seq_len))
        if value < 1
    ]
    if not 0 <= padding < 1:
        problems.append(f"padding={padding} must be at least 0 and below 1")
    if problems:
        raise DataError.from_problems("cannot serve batches", problems)
