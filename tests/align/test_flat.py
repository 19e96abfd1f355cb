from __future__ import annotations

import itertools
import math

import pytest
import torch

from paralign.align.flat import flat_boxes

SHAPES = [(), (7,), (1, 1), (4, 5), (3, 1, 4), (2, 3, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_range(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).view(shape)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        held = torch.arange(start, stop)
        seen: list[int] = []
        for box in flat_boxes(shape, start, stop):
            part = held[box.offset : box.offset + math.prod(box.shape)].view(box.shape)
            assert torch.equal(part, whole[tuple(slice(a, b) for a, b in box.intervals)])
            seen += part.flatten().tolist()
        assert seen == list(range(start, stop)), (start, stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_are_few_boxes(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    most = max(1, 2 * len(shape) - 1)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        assert 1 <= len(list(flat_boxes(shape, start, stop))) <= most


def test_an_empty_range_has_no_box() -> None:
    assert list(flat_boxes((4, 5), 3, 3)) == []
