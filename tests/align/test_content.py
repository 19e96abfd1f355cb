from __future__ import annotations

import itertools
import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paralign.align import lines
from paralign.align.content import ContentIndex, Match
from paralign.align.lines import ReadRows, Stack
from paralign.layout import Box


def reader(tensor: Tensor) -> ReadRows:
    rows = tensor.reshape(-1, Stack(tuple(tensor.shape)).columns)
    return lambda first, last: rows[first:last]


def index_of(reference: dict[str, Tensor], longest: int = 40) -> ContentIndex:
    tensors = {name: (tuple(tensor.shape), reader(tensor)) for name, tensor in reference.items()}
    return ContentIndex(tensors, range(4, longest))


def find(reference: dict[str, Tensor], stored: Tensor) -> Match:
    """Match, and check that every part is what it is said to be, bit for bit, and none twice."""
    stored = stored.contiguous().clone()
    match = index_of(reference).match(tuple(stored.shape), reader(stored))
    seen = torch.zeros(stored.numel(), dtype=torch.int64)
    for part in match.parts:
        window = part.lens.window(part.box)
        arguments = (window.shape, window.strides, window.offset)
        held = stored.reshape(-1).as_strided(*arguments)
        assert torch.equal(held, reference[part.name][region(part.box)]), part
        seen.as_strided(*arguments).add_(1)
    assert int(seen.max()) <= 1
    if match.is_complete:
        assert int(seen.min()) == 1
    return match


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


REFERENCE = {
    "q": draw(1, 16, 8),
    "k": draw(2, 8, 8),
    "v": draw(3, 8, 8),
    "o": draw(4, 8, 16),
    "e.0": draw(5, 6, 9),
    "e.1": draw(6, 6, 9),
    "stack": draw(7, 3, 5, 8),
    "conv": draw(8, 5, 4, 3, 3),
    "vector": draw(9, 24),
}


@given(
    heads=st.sampled_from([1, 2, 4, 8]),
    degree=st.sampled_from([1, 2, 4]),
    turned=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_fused_qkv_in_any_interleaving(heads: int, degree: int, turned: bool) -> None:
    blocks = [
        torch.cat([REFERENCE[part].chunk(heads)[head] for part in "qkv"]) for head in range(heads)
    ]
    fused = torch.cat(blocks)
    held = [fused.chunk(degree)[rank] for rank in range(degree)]
    elements = 0
    for piece in held:
        match = find(REFERENCE, piece.t() if turned else piece)
        assert match.is_complete
        elements += sum(part.box.numel for part in match.parts)
    assert elements == fused.numel()


@given(
    name=st.sampled_from(["q", "o", "e.0", "stack", "conv", "vector"]),
    degree=st.integers(1, 5),
    dim=st.integers(0, 3),
    turned=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_shards_along_any_dim_even_and_uneven(
    name: str, degree: int, dim: int, turned: bool
) -> None:
    whole = REFERENCE[name]
    dim %= whole.dim()
    if name == "conv" and dim > 1:
        dim = 0  # kernels are not cut
    for piece in whole.chunk(degree, dim):
        stored = piece.transpose(-1, -2) if turned and whole.dim() in (2, 3) else piece
        if min(stored.shape[-2:] if stored.dim() > 1 else stored.shape) < 4:
            continue  # lines of fewer elements say too little
        match = find(REFERENCE, stored)
        assert match.is_complete
        assert match.names == [name]


@given(st.permutations(range(16)))
@settings(max_examples=20, deadline=None)
def test_rows_in_any_order(order: list[int]) -> None:
    match = find(REFERENCE, REFERENCE["q"][order])
    assert match.is_complete
    assert match.names == ["q"]


@pytest.mark.parametrize("form", ["stacked", "turned", "offset"])
def test_experts(form: str) -> None:
    both = torch.stack([REFERENCE["e.0"], REFERENCE["e.1"]])
    stored = {"stacked": both, "turned": both.transpose(1, 2), "offset": REFERENCE["stack"][1:]}
    match = find(REFERENCE, stored[form])
    assert match.is_complete
    assert match.names == (["stack"] if form == "offset" else ["e.0", "e.1"])


def test_padding_is_the_unknown_end() -> None:
    match = find(REFERENCE, torch.cat([REFERENCE["q"], torch.full((3, 8), 0.25)]))
    assert (match.num_found, match.num_unknown, match.unknown_from) == (16, 3, 16)
    inside = torch.cat([REFERENCE["q"][:5], torch.full((3, 8), 0.25), REFERENCE["q"][5:]])
    assert find(REFERENCE, inside).unknown_from is None


@given(st.integers(0, 15), st.integers(0, 7))
@settings(max_examples=20, deadline=None)
def test_near_duplicates_are_told_apart_by_one_element(row: int, column: int) -> None:
    twin = REFERENCE["q"].clone()
    twin[row, column] = torch.nextafter(twin[row, column], torch.tensor(math.inf))
    reference = {"q": REFERENCE["q"], "twin": twin}
    assert find(reference, twin).names == ["twin"]
    assert find(reference, REFERENCE["q"]).names == ["q"]
    # A shard without that row or column could be either one's, and is not paired.
    others = torch.arange(16)[torch.arange(16) // 4 != row // 4][:4]
    match = find(reference, REFERENCE["q"][others])
    assert match.parts == []
    assert match.alike == ("q", "twin")


def test_constant_weights_are_alike_everything_constant() -> None:
    reference = {"a": torch.ones(8), "b": torch.ones(8), "zero": torch.zeros(8)}
    match = find(reference, torch.ones(8))
    assert (match.parts, match.alike) == ([], ("a", "b"))
    assert find(reference, torch.full((8,), 2.0)).alike == ()


def test_a_row_of_zeros_goes_with_its_neighbours() -> None:
    table = draw(11, 6, 8)
    table[0] = table[3] = 0.0
    match = find({"table": table, "bias": torch.zeros(8), "other": draw(12, 6, 8)}, table[:4])
    assert match.is_complete
    assert [part.box.shape for part in match.parts] == [(4, 8)]


def test_both_zeros_are_equal_and_dtypes_matter_by_value() -> None:
    stored = REFERENCE["k"].clone()
    stored[2, 3] = -0.0
    zeroed = {**REFERENCE, "k": torch.where(stored == 0, torch.zeros(()), stored)}
    assert find(zeroed, stored).names == ["k"]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    part=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_hashes_do_not_depend_on_how_much_is_read_at_once(shape: list[int], part: int) -> None:
    tensor = draw(0, *shape)
    stack = Stack(tuple(shape))
    wanted = [
        (way, length)
        for way in (lines.ROWS, lines.COLUMNS)
        for length in range(1, stack.length(way) + 1)
    ]
    expected = lines.line_hashes(stack, reader(tensor), wanted)
    with patch.object(lines, "PART_ELEMENTS", part):
        found = lines.line_hashes(stack, reader(tensor), wanted)
    assert all(torch.equal(found[key], expected[key]) for key in wanted)


def test_hashes_of_different_lines_differ() -> None:
    stack = Stack((64, 64))
    tensor = draw(21, 64, 64)
    found = lines.line_hashes(stack, reader(tensor), [(lines.ROWS, 64), (lines.COLUMNS, 64)])
    every = torch.cat([hashes.reshape(-1) for hashes in found.values()])
    assert len(every.unique()) == 128
    swapped = tensor.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    other = lines.line_hashes(stack, reader(swapped), [(lines.ROWS, 64)])[lines.ROWS, 64]
    assert not bool((other == found[lines.ROWS, 64]).any())


def test_offsets_of_shards() -> None:
    assert lines.offsets(12, 4) == [0, 4, 8]
    assert lines.offsets(11, 4) == [0, 4, 7]
    assert lines.offsets(4, 4) == [0]


def test_a_tensor_that_is_nowhere() -> None:
    match = find(REFERENCE, draw(99, 7, 8))
    assert (match.num_found, match.num_unknown, match.names) == (0, 7, [])
    shapes = itertools.product((3, 5), (1, 2))
    for rows, columns in shapes:  # too short to say anything
        assert find(REFERENCE, draw(98, rows, columns)).parts == []
