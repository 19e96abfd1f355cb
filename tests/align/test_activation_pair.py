from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paralign.align.activation_pair import Found, StepOutputs, TokenDims, compose, token_dims
from paralign.align.locate import whole_of
from paralign.align.measure import measure
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.token_map import Block, Held, spans_of
from paralign.align.trace import Facts, RankIndex
from paralign.align.trace_reader import TraceReader
from paralign.align.trace_writer import TraceWriter
from paralign.layout import Span, whole

ROWS, LENGTH = 4, 8
FULL = torch.randn(ROWS, LENGTH, 6, generator=torch.Generator().manual_seed(0)).double()
ZIGZAG = {0: [0, 1, 6, 7], 1: [2, 3, 4, 5]}


@pytest.mark.parametrize(
    ("shape", "degrees", "wanted"),
    [
        ((2, 5, 7), (), TokenDims(0, 1)),
        ((5, 2, 7), (), TokenDims(1, 0)),
        ((2, 4, 5, 7), (), TokenDims(0, 2)),
        ((10, 7), (), TokenDims(0, 0)),
        ((2, 5), (), TokenDims(0, 1)),
        ((2, 3, 7), (), None),
        ((9, 7), (), None),
        ((7,), (), None),
        ((2, 3, 7), (2,), None),
    ],
)
def test_dims_are_found_by_their_sizes(
    shape: tuple[int, ...], degrees: tuple[int, ...], wanted: TokenDims | None
) -> None:
    assert token_dims(shape, 2, 5, degrees=degrees) == ([wanted] if wanted else [])


def test_a_sequence_may_be_cut_once_more() -> None:
    assert token_dims((2, 4, 7), 2, 8, degrees=(2,)) == [TokenDims(0, 1, 2)]
    assert token_dims((4, 2, 7), 2, 8, degrees=(2,)) == [TokenDims(1, 0, 2)]


def test_all_dims_that_fit_are_told_the_likelier_first() -> None:
    assert token_dims((2, 5, 5, 7), 2, 5) == [TokenDims(0, 1), TokenDims(0, 2)]
    assert token_dims((2, 2, 7), 2, 2) == [TokenDims(0, 1)]


def test_maps_are_composed() -> None:
    inner = (Span((0, 2), (4, 6)), Span((2, 5), (0, 3)))
    outer = (Span((0, 1), (10, 11)), Span((1, 5), (20, 24)))
    assert compose(inner, outer) == (
        Span((0, 1), (23, 24)),
        Span((2, 3), (10, 11)),
        Span((3, 5), (20, 22)),
    )


def held(rows: list[int], positions: list[int]) -> Held:
    return Held((len(rows), len(positions)), (Block(spans_of(rows), spans_of(positions)),), ())


def write(folder: Path, by_rank: list[list[tuple[int, Tensor]]], **fields: object) -> TraceReader:
    """Write output ``m`` per rank: (micro-batch, local tensor)."""
    folder.mkdir(exist_ok=True)
    ranks = list(range(len(by_rank)))
    for rank, outputs in enumerate(by_rank):
        index = RankIndex(
            rank, len(ranks), "id", coordinates={"tp": rank}, axes={"tp": ranks}, steps=[0]
        )
        writer = TraceWriter(folder, index)
        writer.write(
            "step0.activations0",
            [
                (
                    TensorEntry(
                        kind=Kind.OUTPUT,
                        name="m",
                        step=0,
                        dtype="float64",
                        shape=tuple(local.shape),
                        map=whole(local.shape),
                        micro_batch=number,
                        **fields,  # type: ignore[arg-type]
                    ),
                    local,
                )
                for number, local in outputs
            ],
        )
        writer.finish(Facts("id", len(ranks), [0], ["outputs"]) if rank == 0 else None)
    return TraceReader(folder)


def quantity(
    trace: TraceReader, places: dict[tuple[int, int], Held], rest: tuple[int, ...]
) -> Found:
    found = StepOutputs(trace, 0, (ROWS, LENGTH), places).quantity(Kind.OUTPUT, "m", rest)
    assert isinstance(found, Found), found
    return found


def check(found: Found, full: Tensor = FULL) -> None:
    assert found.uncovered == 0
    assert torch.equal(whole_of(found.quantity), full)
    assert measure(found.quantity, found.quantity).total.relative == 0.0


def test_as_many_heads_as_local_positions_are_told_apart_by_the_other_run(tmp_path: Path) -> None:
    heads = 4
    full = torch.arange(ROWS * heads * LENGTH * 6).double().view(ROWS, heads, LENGTH, 6)
    halves = [[(0, half.contiguous())] for half in full.chunk(2, 2)]
    rows = list(range(ROWS))
    where = {(0, 0): held(rows, list(range(LENGTH)))}
    places = {(rank, 0): held(rows, list(range(4 * rank, 4 * rank + 4))) for rank in range(2)}
    with write(tmp_path / "one", [[(0, full)]]) as one, write(tmp_path / "two", halves) as two:
        reference = StepOutputs(one, 0, (ROWS, LENGTH), where)
        parallel = StepOutputs(two, 0, (ROWS, LENGTH), places)
        assert reference.possible_dims(Kind.OUTPUT, "m") == [(0, 2)]
        assert parallel.possible_dims(Kind.OUTPUT, "m") == [(0, 1), (0, 2)]
        right = parallel.quantity(Kind.OUTPUT, "m", (heads, 6), (0, 2))
        assert isinstance(right, Found)
        check(right, full.transpose(1, 2))
        likelier = parallel.quantity(Kind.OUTPUT, "m", (heads, 6))
        assert isinstance(likelier, Found)
        assert not torch.equal(whole_of(likelier.quantity), full.transpose(1, 2))


LAYOUTS = {
    "rows first": lambda part: part,
    "positions first": lambda part: part.transpose(0, 1).contiguous(),
    "heads between": lambda part: part.reshape(*part.shape[:2], 3, 2).transpose(1, 2).contiguous(),
    "flat": lambda part: part.flatten(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_of_any_layout_are_put_together(tmp_path: Path, layout: str) -> None:
    """Rows over two micro-batches, positions in zig-zag over two ranks."""
    places = {
        (rank, number): held([2 * number, 2 * number + 1], ZIGZAG[rank])
        for rank in (0, 1)
        for number in (0, 1)
    }
    parts = [
        [(number, LAYOUTS[layout](FULL[2 * number : 2 * number + 2, at])) for number in (0, 1)]
        for at in ZIGZAG.values()
    ]
    rest = (3, 2) if layout == "heads between" else (6,)
    with write(tmp_path, parts) as trace:
        found = quantity(trace, places, rest)
        check(found, FULL.reshape(ROWS, LENGTH, *rest))
        assert not found.is_guess
        assert {box.shape[1] for _, box in found.quantity.cover} == {2, 4}


def test_replicas_are_all_looked_at(tmp_path: Path) -> None:
    places = {(rank, 0): held([0, 1, 2, 3], list(range(LENGTH))) for rank in (0, 1)}
    with write(tmp_path, [[(0, FULL)], [(0, FULL + 1)]]) as trace:
        found = quantity(trace, places, (6,))
        assert measure(found.quantity, found.quantity).replicas_differ


def test_summands_are_added_up(tmp_path: Path) -> None:
    places = {(rank, 0): held([0, 1, 2, 3], list(range(LENGTH))) for rank in (0, 1)}
    parts = [[(0, 0.25 * FULL)], [(0, 0.75 * FULL)]]
    with write(tmp_path, parts, partial_over=("tp",)) as trace:
        check(quantity(trace, places, (6,)))


def test_what_is_placed_by_size_alone_is_a_guess(tmp_path: Path) -> None:
    rows, every = [0, 1, 2, 3], list(range(LENGTH))
    places = {(rank, 0): held(rows, every) for rank in (0, 1)}
    features = [[(0, FULL[:, :, :3].contiguous())], [(0, FULL[:, :, 3:].contiguous())]]
    with write(tmp_path / "a", features) as trace:
        found = quantity(trace, places, (6,))
        check(found)
        assert found.is_guess
    sequence = [[(0, FULL[:, :4].contiguous())], [(0, FULL[:, 4:].contiguous())]]
    with write(tmp_path / "b", sequence) as trace:
        found = quantity(trace, places, (6,))
        check(found)
        assert found.is_guess


def test_what_has_no_place_says_why(tmp_path: Path) -> None:
    places = {(0, 0): held([0, 1, 2, 3], list(range(LENGTH)))}
    with write(tmp_path, [[(0, torch.zeros(5, 6))]]) as trace:
        side = StepOutputs(trace, 0, (ROWS, LENGTH), places)
        assert "no dims for rows and positions" in str(side.quantity(Kind.OUTPUT, "m", (6,)))
        assert side.rest_of(Kind.OUTPUT, "m") is None
    with write(tmp_path, [[(0, FULL[:, :, :5])]]) as trace:
        side = StepOutputs(trace, 0, (ROWS, LENGTH), places)
        assert "[6] behind rows and positions" in str(side.quantity(Kind.OUTPUT, "m", (6,)))


def test_tokens_that_nobody_holds_are_counted(tmp_path: Path) -> None:
    places = {(0, 0): held([0, -1, 2, 3], list(range(LENGTH)))}
    with write(tmp_path, [[(0, FULL)]]) as trace:
        assert quantity(trace, places, (6,)).uncovered == LENGTH


def test_modules_have_the_reference_names(tmp_path: Path) -> None:
    places = {(0, 0): held([0, 1, 2, 3], list(range(LENGTH)))}
    with write(tmp_path, [[(0, FULL)]]) as trace:
        side = StepOutputs(trace, 0, (ROWS, LENGTH), places, lambda rank, name: f"{name}.{rank}")
        assert side.names(Kind.OUTPUT) == ["m.0"]
