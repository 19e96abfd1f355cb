from __future__ import annotations

import pytest

from paralign.data.corpus import find_corpus
from paralign.data.rows import IGNORED, Row, Rows
from paralign.data.token_build import prepare_tokens
from paralign.data.token_file import TokenFile
from paralign.data.token_rows import DocumentRows, PackedRows
from paralign.data.tokenizer import ByteTokenizer
from paralign.errors import DataError
from tests.data.texts import write_documents


def tokens(folder, *lengths: int) -> TokenFile:
    corpus = find_corpus(str(write_documents(folder / "text", *lengths)))
    return prepare_tokens(corpus, ByteTokenizer(), folder / "tokens")


def lists(rows: Rows) -> list[tuple[list[int], list[int]]]:
    read = [rows.read(number) for number in range(rows.num_rows)]
    return [(row.tokens.tolist(), row.labels.tolist()) for row in read]


def test_documents_begin_rows(tmp_path):
    assert lists(DocumentRows(tokens(tmp_path, 5, 3, 9), seq_len=4)) == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([5, 6, 7], [6, 7, IGNORED]),
        ([8, 9, 10, 11], [9, 10, 11, 12]),
        ([12, 13, 14, 15], [13, 14, 15, 16]),
    ]


def test_packed_documents_leave_no_gap_and_do_not_predict_each_other(tmp_path):
    rows = PackedRows(tokens(tmp_path, 5, 3, 6), seq_len=4, isolate=False)
    assert lists(rows) == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [IGNORED, 6, 7, IGNORED]),
        ([8, 9, 10, 11], [9, 10, 11, 12]),
        ([12, 13], [13, IGNORED]),
    ]
    assert rows.read(1).documents is None


def test_a_document_that_ends_with_its_row_predicts_nothing_there(tmp_path):
    rows = PackedRows(tokens(tmp_path, 4, 4, 3), seq_len=4, isolate=True)
    assert lists(rows) == [
        ([0, 1, 2, 3], [1, 2, 3, IGNORED]),
        ([4, 5, 6, 7], [5, 6, 7, IGNORED]),
        ([8, 9, 10], [9, 10, IGNORED]),
    ]


def test_isolated_rows_say_which_document_each_token_is_of(tmp_path):
    rows = PackedRows(tokens(tmp_path, 2, 3, 2, 9), seq_len=6, isolate=True)
    read = [rows.read(number).documents for number in range(rows.num_rows)]
    assert [one.tolist() for one in read if one is not None] == [
        [0, 0, 1, 1, 1, 2],
        [0, 1, 1, 1, 1, 1],
        [0, 0, 0, 0],
    ]


@pytest.mark.parametrize("seq_len", [2, 3, 7, 16])
def test_every_row_has_something_to_predict_and_labels_are_all_next_tokens(tmp_path, seq_len):
    lengths = (2, 2, 2, 3, 17, 2, 5, 33, 2, 2)
    rows = PackedRows(tokens(tmp_path, *lengths), seq_len=seq_len, isolate=True)
    read = [rows.read(number) for number in range(rows.num_rows)]
    assert all(bool((row.labels != IGNORED).any()) for row in read)
    predicted = sum(int((row.labels != IGNORED).sum()) for row in read)
    assert predicted == sum(length - 1 for length in lengths)
    for row in read:
        _check_labels(row)


def _check_labels(row: Row) -> None:
    assert row.documents is not None
    for at in range(len(row.tokens) - 1):
        if row.documents[at] == row.documents[at + 1]:
            assert row.labels[at] == row.tokens[at + 1]
        else:
            assert row.labels[at] == IGNORED


def test_rows_of_one_token_cannot_be_packed(tmp_path):
    with pytest.raises(DataError, match=r"seq_len=1 is too short to pack"):
        PackedRows(tokens(tmp_path, 9), seq_len=1, isolate=False)
