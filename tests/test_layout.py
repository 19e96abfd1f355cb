from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from paralign.errors import LayoutError
from paralign.layout import (
    Box,
    LocalMap,
    boxes,
    local_boxes,
    local_shape,
    overlap_elements,
    whole,
)


def cut(full: torch.Tensor, local_map: LocalMap) -> torch.Tensor:
    """Build the local tensor that a map describes, box by box."""
    local = torch.full(local_shape(local_map), -1, dtype=full.dtype)
    for box in boxes(local_map):
        source = tuple(slice(at, at + n) for at, n in zip(box.start, box.shape, strict=True))
        local[box.local_slices] = full[source]
    return local


def torch_local(full: torch.Tensor, placements: Any, mesh: Any, coordinate: Any) -> torch.Tensor:
    """Cut ``full`` with torch's own code, the way ``distribute_tensor`` does."""
    for placement, degree, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Shard | _StridedShard):
            pieces, _ = placement._split_tensor(full, degree, with_padding=False)
            full = pieces[index]
    return full


placement_kinds = st.one_of(
    st.builds(Shard, st.integers(0, 1)),
    st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor),
        st.integers(0, 1),
        st.integers(1, 4),
    ),
    st.just(Replicate()),
    st.just(Partial()),
)


@st.composite
def layouts(draw: Any) -> Any:
    shape = draw(st.tuples(st.integers(0, 13), st.integers(0, 7)))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    placements = draw(st.lists(placement_kinds, min_size=len(mesh), max_size=len(mesh)))
    return shape, tuple(mesh), tuple(placements)


@given(layouts())
def test_boxes_hold_what_torch_gives_each_rank(layout: Any) -> None:
    shape, mesh, placements = layout
    full = torch.arange(shape[0] * shape[1]).view(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        local_map = local_boxes(shape, placements, mesh, coordinate)
        expected = torch_local(full, placements, mesh, coordinate)
        assert local_shape(local_map) == tuple(expected.shape)
        assert torch.equal(cut(full, local_map), expected)
        torch_shape, _ = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        assert local_shape(local_map) == torch_shape


@given(layouts())
def test_pieces_cover_each_element_once_per_replica(layout: Any) -> None:
    shape, mesh, placements = layout
    count = torch.zeros(shape, dtype=torch.int64)
    replicas = 1
    for placement, degree in zip(placements, mesh, strict=True):
        replicas *= 1 if isinstance(placement, Shard | _StridedShard) else degree
    distinct = set()
    for coordinate in itertools.product(*map(range, mesh)):
        local_map = local_boxes(shape, placements, mesh, coordinate)
        distinct.add(local_map)
        for box in boxes(local_map):
            count[tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))] += 1
    assert (count == replicas).all()
    assert overlap_elements([box for local_map in distinct for box in boxes(local_map)]) == 0


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(1, 40),
)
def test_split_keeps_every_element_and_the_limit(dims: list[tuple[int, int]], limit: int) -> None:
    box = Box(tuple(0 for _ in dims), tuple(a for a, _ in dims), tuple(n for _, n in dims))
    seen = torch.zeros(box.shape, dtype=torch.int64)
    for part in box.split(limit):
        assert 0 < part.numel <= limit
        assert part.start == tuple(a + b for a, b in zip(box.start, part.local, strict=True))
        seen[part.local_slices] += 1
    assert (seen == 1).all()


@given(layouts(), layouts())
def test_intersections_of_two_layouts_cover_the_tensor(one: Any, two: Any) -> None:
    shape = one[0]
    first = [
        local_boxes(shape, one[2], one[1], at) for at in itertools.product(*map(range, one[1]))
    ]
    second = [
        local_boxes(shape, two[2], two[1], at) for at in itertools.product(*map(range, two[1]))
    ]
    count = torch.zeros(shape, dtype=torch.int64)
    for a in {box for local_map in set(first) for box in boxes(local_map)}:
        for b in {box for local_map in set(second) for box in boxes(local_map)}:
            if both := a.intersect(b):
                assert both[0].start == both[1].start
                assert both[0].shape == both[1].shape
                region = zip(both[0].start, both[0].shape, strict=True)
                count[tuple(slice(at, at + n) for at, n in region)] += 1
    assert (count == 1).all()


def test_strided_shard_reads_as_in_the_docstring() -> None:
    local_map = local_boxes((10, 4), (_StridedShard(0, split_factor=2),), (2,), (0,))
    assert local_map == ((((0, 3), (0, 3)), ((3, 6), (5, 8))), (((0, 4), (0, 4)),))


def test_the_shape_held_decides_how_an_uneven_strided_shard_is_read() -> None:
    placements, mesh = (_StridedShard(0, split_factor=2), Shard(0)), (4, 2)
    shapes = {
        at: local_shape(local_boxes((9, 1), placements, mesh, at))[0]
        for at in ((3, 0), (3, 1), (0, 0))
    }
    assert shapes == {(3, 0): 1, (3, 1): 0, (0, 0): 2}
    # fully_shard: part 1 (rows 5 to 9) is cut over the four ranks of fsdp, one row each.
    fsdp = local_boxes((9, 1), placements, mesh, (3, 1), held_shape=(1, 1))
    assert fsdp[0] == (((0, 1), (8, 9)),)
    assert local_boxes((9, 1), placements, mesh, (3, 0), held_shape=(0, 1))[0] == ()
    # distribute_tensor: left to right.
    plain = local_boxes((9, 1), placements, mesh, (3, 0), held_shape=(1, 1))
    assert plain[0] == (((0, 1), (8, 9)),)
    with pytest.raises(LayoutError, match=r"held_shape=\(3, 1\) is not what placements="):
        local_boxes((9, 1), placements, mesh, (3, 0), held_shape=(3, 1))


def test_a_scalar_is_one_box_and_an_empty_tensor_none() -> None:
    assert boxes(whole(())) == [Box((), (), ())]
    assert boxes(whole((0, 3))) == []
    assert local_shape(whole((0, 3))) == (0, 3)


def test_overlap_is_counted() -> None:
    parts = [Box((0, 0), (0, 0), (4, 2)), Box((0, 0), (3, 1), (4, 2)), Box((0, 0), (7, 0), (1, 3))]
    assert overlap_elements(parts) == 1
    assert overlap_elements([Box((), (), ()), Box((), (), ())]) == 1
    assert overlap_elements([]) == 0


def test_negative_dims_count_from_the_end() -> None:
    assert local_boxes((4, 6), (Shard(-1),), (2,), (1,)) == local_boxes(
        (4, 6), (Shard(1),), (2,), (1,)
    )


@dataclass(frozen=True)
class Ragged:
    units: tuple[int, ...] = (1, 2)


@pytest.mark.parametrize(
    ("placements", "mesh", "coordinate", "message"),
    [
        (
            (Shard(2),),
            (2,),
            (0,),
            "cuts dim 2 of a tensor with 2 dims. Use a dim from 0 to 1.",
        ),
        ((Shard(0), Shard(1)), (2,), (0,), "has 2 entries for a mesh of shape (2,)"),
        ((Ragged(),), (2,), (0,), "is none of Shard, Replicate and Partial"),
    ],
)
def test_wrong_layouts_are_refused(
    placements: Any, mesh: Any, coordinate: Any, message: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        local_boxes((4, 6), placements, mesh, coordinate)
    assert message in str(caught.value)
