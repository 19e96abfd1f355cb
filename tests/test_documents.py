from __future__ import annotations

import torch

from paralign.documents import document_mask, document_starts, positions_inside

NUMBERS = torch.tensor([[7, 7, 7, 2, 2, 9, 9, 9], [0, 1, 2, 3, 3, 3, 3, 0]])
STARTS = [[0, 0, 0, 3, 3, 5, 5, 5], [0, 1, 2, 3, 3, 3, 3, 7]]


def test_documents_are_numbered_by_where_they_begin():
    starts = document_starts(NUMBERS)
    assert starts.tolist() == STARTS
    assert torch.equal(document_starts(starts), starts)


def test_a_number_that_comes_back_is_another_document():
    assert document_starts(torch.tensor([[1, 1, 2, 1]])).tolist() == [[0, 0, 2, 3]]


def test_positions_count_from_the_beginning_of_each_document_also_in_a_slice():
    starts = document_starts(NUMBERS)
    whole = torch.arange(8).expand(2, -1)
    assert positions_inside(whole, starts).tolist() == [
        [0, 1, 2, 0, 1, 0, 1, 2],
        [0, 0, 0, 0, 1, 2, 3, 0],
    ]
    piece = torch.tensor([[2, 3, 6, 7]] * 2)
    assert positions_inside(piece, starts).tolist() == [[2, 0, 1, 2], [0, 0, 3, 0]]
    assert positions_inside(piece, None) is piece


def test_a_token_attends_to_itself_and_what_is_before_it_in_its_document():
    mask = document_mask(document_starts(NUMBERS))
    assert mask is not None and mask.shape == (2, 1, 8, 8)
    for row in range(2):
        for query in range(8):
            for key in range(8):
                same = STARTS[row][query] == STARTS[row][key]
                assert mask[row, 0, query, key] == (same and key <= query)
    assert document_mask(None) is None
