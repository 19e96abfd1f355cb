from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paralign.align.lens import Lens, row_major
from paralign.align.regions import apart, as_map, clip, global_shape, held_parts
from paralign.align.trace import TensorEntry
from paralign.layout import Box, LocalMap, Span, boxes, local_shape, overlap_elements, whole


def entry(shape: tuple[int, ...], held: LocalMap, **fields: Any) -> TensorEntry:
    return TensorEntry("grad", "w", 0, "float64", shape, held, **fields)


@st.composite
def flat_entries(draw: Any) -> TensorEntry:
    """Ranges of a tp-local part (two runs of rows) of a tensor, some of it padding."""
    rows, columns = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    cut = draw(st.integers(1, rows))
    held = (
        (Span((0, cut), (0, cut)), Span((cut, rows), (rows + 1, 2 * rows + 1 - cut)))
        if cut < rows
        else (Span((0, rows), (0, rows)),),
        (Span((0, columns), (0, columns)),),
    )
    held = (held[0], held[1])
    start = draw(st.integers(0, rows * columns))
    stop = draw(st.integers(start, rows * columns))
    true_rows = draw(st.integers(0, 2 * rows + 1))
    true_shape = draw(st.sampled_from([None, (true_rows, columns)]))
    return entry((2 * rows + 1, columns), held, flat=(start, stop), true_shape=true_shape)


@given(flat_entries())
@settings(max_examples=200, deadline=None)
def test_a_flat_range_is_the_elements_it_says(item: TensorEntry) -> None:
    assert item.flat is not None
    full = torch.arange(math.prod(item.shape)).view(item.shape)
    local = torch.full(local_shape(item.map), -1)
    for box in boxes(item.map):
        source = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
        local[box.local_slices] = full[source]
    stored = local.reshape(-1)[slice(*item.flat)].clone()
    true = full[tuple(slice(0, n) for n in global_shape(item))]
    seen = torch.zeros_like(true)
    for held, lens in held_parts(item):
        assert lens is not None
        (box,) = boxes(held)
        window = lens.window(box)
        part = stored.as_strided(window.shape, window.strides, window.offset)
        source = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
        assert torch.equal(part, true[source])
        seen[source] += 1
    expected = torch.isin(true, stored)
    assert torch.equal(seen, expected.to(seen.dtype))


def test_padding_is_left_out_of_a_map() -> None:
    held = ((Span((0, 4), (8, 12)),), (Span((0, 2), (0, 2)),))
    assert held_parts(entry((12, 2), held)) == [(held, None)]
    short = ((Span((0, 2), (8, 10)),), (Span((0, 2), (0, 2)),))
    assert held_parts(entry((12, 2), held, true_shape=(10, 2))) == [(short, None)]
    assert clip(held, (8, 2))[0] == ()  # all of it is padding


intervals = st.tuples(st.integers(0, 5), st.integers(1, 4))


@given(st.lists(st.tuples(intervals, intervals), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_boxes_are_cut_until_equal_or_disjoint(shapes: list[Any]) -> None:
    parts = [
        Box((0, 0), tuple(first for first, _ in dims), tuple(n for _, n in dims)) for dims in shapes
    ]
    cut = apart(parts)
    every = [piece for pieces in cut for piece in pieces]
    distinct = {(piece.start, piece.shape): piece for piece in every}
    assert overlap_elements(list(distinct.values())) == 0
    for box, pieces in zip(parts, cut, strict=True):
        assert sum(piece.numel for piece in pieces) == box.numel
        for piece in pieces:
            at = zip(box.start, piece.local, strict=True)
            assert piece.start == tuple(a + b for a, b in at)
            assert box.intersect(piece) is not None


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 4)] * 3))
def test_a_lens_sees_a_transposed_tensor(order: list[int], shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    strides = tuple(row_major(shape)[dim] for dim in order)
    turned = tensor.permute(order)
    lens = Lens(0, strides)
    for index in itertools.product(*(range(n) for n in turned.shape)):
        box = Box(index, index, tuple(n - at for n, at in zip(turned.shape, index, strict=True)))
        window = lens.window(box)
        seen = tensor.reshape(-1).as_strided(window.shape, window.strides, window.offset)
        assert torch.equal(seen, turned[tuple(slice(at, None) for at in index)])
        assert window.reach <= tensor.numel() - window.offset


def test_as_map_is_whole_at_its_place() -> None:
    assert as_map(Box((3, 1), (0, 0), (2, 5))) == whole((2, 5))
