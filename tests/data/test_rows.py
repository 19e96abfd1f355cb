from __future__ import annotations

import pytest
import torch

from paralign.data.corpus import find_corpus
from paralign.data.rows import IGNORED, ByteRows, Row, batch_of, split_rows
from paralign.errors import DataError
from tests.data.texts import write_documents


def test_the_last_rows_are_held_out_and_no_row_is_in_both(tmp_path):
    rows = ByteRows(find_corpus(str(write_documents(tmp_path, 41, 60))), seq_len=4)
    kept, held_out = split_rows(rows, 0.2)
    assert (kept.num_rows, held_out.num_rows) == (20, 5)
    both = [part.read(n).tokens.tolist() for part in (kept, held_out) for n in range(part.num_rows)]
    assert both == [rows.read(n).tokens.tolist() for n in range(rows.num_rows)]
    assert len({rows.fingerprint, kept.fingerprint, held_out.fingerprint}) == 3


def test_something_is_held_out_and_something_is_left(tmp_path):
    rows = ByteRows(find_corpus(str(write_documents(tmp_path / "a", 9))), seq_len=4)
    assert split_rows(rows, 0.001)[1].num_rows == 1
    one = ByteRows(find_corpus(str(write_documents(tmp_path / "b", 5))), seq_len=4)
    with pytest.raises(DataError, match=r"share=0.5 leaves none of them to train on"):
        split_rows(one, 0.5)


def test_what_lies_behind_the_end_of_a_row_is_a_document_of_its_own():
    def row(*documents: int) -> Row:
        ones = torch.ones(len(documents), dtype=torch.int64)
        return Row(ones, ones, torch.tensor(documents))

    batch = batch_of([row(0, 0, 1), row(0, 0, 0, 0), None], 4)
    assert batch["documents"].tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[1, 1, 1, IGNORED], [1, 1, 1, 1], [IGNORED] * 4]
    assert "documents" not in batch_of([Row(torch.ones(1).long(), torch.ones(1).long())], 4)
