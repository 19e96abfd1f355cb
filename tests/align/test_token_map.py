from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.token_map import (
    Held,
    TokenTable,
    find_tokens,
    spans_of,
    step_inputs,
    step_samples,
    token_table,
)
from paralign.align.trace import Facts, RankIndex, TokenMap
from paralign.align.trace_reader import TraceReader
from paralign.align.trace_writer import TraceWriter
from paralign.layout import whole

TABLE = torch.randint(0, 50, (6, 16), generator=torch.Generator().manual_seed(0))


def table(tokens: Tensor = TABLE) -> TokenTable:
    found = token_table({(0, 0): {"tokens": tokens}}, {})
    assert found is not None
    return found


def on_cp(at: int, size: int = 2) -> RankIndex:
    return RankIndex(at, size, "id", coordinates={"cp": at}, axes={"cp": list(range(size))})


def cells(held: Held) -> list[list[tuple[int, int] | None]]:
    """Return for every local token its global row and position."""
    found: list[list[tuple[int, int] | None]] = [
        [None] * held.shape[1] for _ in range(held.shape[0])
    ]
    for block in held.blocks:
        for rows in block.rows:
            for places in block.positions:
                for i in range(rows.local[1] - rows.local[0]):
                    for j in range(places.local[1] - places.local[0]):
                        cell = rows.global_[0] + i, places.global_[0] + j
                        found[rows.local[0] + i][places.local[0] + j] = cell
    return found


def check(held: Held, tokens: Tensor) -> None:
    for row, places in zip(tokens.tolist(), cells(held), strict=True):
        assert [None if at is None else int(TABLE[at]) for at in places] == row
    assert held.lost == ()


CUTS = {
    "rows of a micro-batch": TABLE[2:4],
    "rows in another order": TABLE[[5, 0, 3]],
    "a slice": TABLE[1:3, 8:16],
    "zig-zag": TABLE[1:3, [0, 1, 2, 3, 12, 13, 14, 15]],
    "zig-zag in the middle": TABLE[:, 4:12],
    "round-robin": TABLE[:, 1::4],
    "an odd run": TABLE[4:, 3:10],
}


@pytest.mark.parametrize("name", CUTS)
def test_rows_are_found_by_content(name: str) -> None:
    tokens = CUTS[name]
    check(find_tokens({"tokens": tokens}, table(), on_cp(0)), tokens)


def test_a_told_row_decides_between_places_that_read_alike() -> None:
    """Blanks stand at the start of row 2 and at the end of row 3; cp rank 0 looks first at 0:8."""
    blank = TABLE.clone()
    blank[2, :8] = blank[3, 8:] = 7
    known = TokenTable(blank, {sample: sample for sample in range(len(blank))})
    fed = {"tokens": blank[3:4, 8:]}
    assert cells(find_tokens(fed, known, on_cp(0), (3,)))[0][0] == (3, 8)
    assert cells(find_tokens(fed, known, on_cp(0)))[0][0] == (2, 0)


def test_places_are_tried_by_the_axis_that_cuts_sequences() -> None:
    blank = TABLE.clone()
    blank[2] = 7  # both halves read alike
    index = RankIndex(2, 4, "id", coordinates={"pp": 1, "cp": 0}, axes={"pp": [0, 2], "cp": [2, 3]})
    held = find_tokens({"tokens": blank[2:3, :8]}, table(blank), index)
    assert cells(held)[0][0] == (2, 0)


def test_rows_may_hold_positions_of_their_own_if_they_are_told() -> None:
    places = torch.tensor([[0, 1, 2, 3], [9, 5, 2, 11]])
    tokens = torch.stack([TABLE[3, places[0]], TABLE[0, places[1]]])
    held = find_tokens({"tokens": tokens, "positions": places}, table(), on_cp(0))
    check(held, tokens)
    assert cells(held)[1] == [(0, 9), (0, 5), (0, 2), (0, 11)]


def test_positions_that_start_again_in_each_document_are_no_places() -> None:
    tokens = TABLE[1:3]
    positions = torch.arange(16).remainder(8).expand(2, -1)
    held = find_tokens({"tokens": tokens, "positions": positions}, table(), on_cp(0))
    assert cells(held)[0] == [(1, at) for at in range(16)]


def test_what_is_not_in_the_table_is_lost() -> None:
    tokens = TABLE[:3].clone()
    tokens[1, 7] += 1
    held = find_tokens({"tokens": tokens}, table(), on_cp(0))
    assert held.lost == (1,)
    assert cells(held)[1] == [None] * 16
    assert cells(held)[2][0] == (2, 0)


def test_padding_behind_the_table_is_left_out() -> None:
    padded = torch.cat([TABLE[2:3], torch.zeros(1, 2, dtype=torch.int64)], dim=1)
    fed = {"tokens": padded, "positions": torch.arange(18)[None]}
    held = find_tokens(fed, table(), on_cp(0))
    assert held.lost == ()
    assert cells(held)[0] == [*((2, at) for at in range(16)), None, None]


def test_coordinates_decide_where_content_cannot() -> None:
    same = torch.ones(2, 8, dtype=torch.int64)
    for at in (0, 1):
        held = find_tokens({"tokens": same[:, :4]}, table(same), on_cp(at))
        assert cells(held)[0] == [(0, 4 * at + i) for i in range(4)]


def test_neighbours_and_sample_numbers_decide_between_rows_that_begin_alike() -> None:
    rows = torch.tensor([[7, 7, 1, 1], [7, 7, 2, 2], [7, 7, 3, 3]])
    halves = rows[1:, :2]
    assert cells(find_tokens({"tokens": halves}, table(rows), on_cp(0)))[1][0] == (1, 0)
    told = token_table({(0, 0): {"tokens": rows}}, {(0, 0): (10, 11, 12)})
    assert told is not None
    held = find_tokens({"tokens": halves}, told, on_cp(0), samples=(11, 12))
    assert [row[0] for row in cells(held)] == [(1, 0), (2, 0)]


def test_a_table_is_put_together_from_told_pieces() -> None:
    fed = {
        (rank, 0): {
            "tokens": TABLE[:2, 8 * rank : 8 * rank + 8],
            "positions": torch.arange(8 * rank, 8 * rank + 8).expand(2, -1),
        }
        for rank in (0, 1)
    }
    assert token_table({}, {}) is None
    found = token_table(fed, dict.fromkeys(fed, (4, 2)))
    assert found is not None
    assert torch.equal(found.tokens, TABLE[[1, 0]])
    assert found.samples == {2: 0, 4: 1}


def test_equal_rows_count_once() -> None:
    assert table(TABLE[[0, 1, 0, 1, 2]]).shape == (3, 16)


def test_spans_join_neighbours_and_leave_out_padding() -> None:
    spans = spans_of([4, 5, -1, 6, 2])
    assert [(*span.local, *span.global_) for span in spans] == [
        (0, 2, 4, 6),
        (3, 4, 6, 7),
        (4, 5, 2, 3),
    ]


def write(
    folder: Path, rank: int, axes: dict[str, list[int]], given: dict[int, Tensor], calls: int
) -> None:
    """Write a rank that was told ``given`` and whose module ``m`` was called ``calls`` times."""
    index = RankIndex(rank, 2, "id", axes=axes, steps=[0])
    index.token_maps.append(TokenMap(0, 0, (3, 5)))
    writer = TraceWriter(folder, index)
    tensors = [
        (
            TensorEntry(
                Kind.INPUT, "tokens", 0, "int64", tuple(t.shape), whole(t.shape), micro_batch=n
            ),
            t,
        )
        for n, t in given.items()
    ]
    tensors += [
        (
            TensorEntry(Kind.OUTPUT, "m", 0, "float64", (1,), whole((1,)), micro_batch=n),
            torch.ones(1),
        )
        for n in range(calls)
    ]
    writer.write("step0.activations0", tensors)
    writer.finish(Facts("id", 2, [0], ["inputs"]) if rank == 0 else None)


def test_what_is_told_at_once_is_cut_and_later_stages_see_the_first_ones(tmp_path: Path) -> None:
    axes = {"pp": [0, 1]}
    write(tmp_path, 0, axes, {0: TABLE[:4]}, calls=2)
    write(tmp_path, 1, axes, {}, calls=2)
    with TraceReader(tmp_path) as trace:
        found = step_inputs(trace, 0)
        assert step_samples(trace, 0)[1, 0] == (3, 5)
        assert step_inputs(trace, 1) == {}
    assert sorted(found) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for key, fed in found.items():
        assert torch.equal(fed["tokens"], TABLE[:2] if key[1] == 0 else TABLE[2:4])
