from __future__ import annotations

from typing import Any

import pytest
import torch

from paralign.align.fused import Fused, FusedPart, rows_of_part
from paralign.errors import ConfigError
from paralign.layout import Span, local_boxes, whole


class Cut:
    def __init__(self, dim: int, split_factor: int = 1) -> None:
        self.dim, self.split_factor = dim, split_factor


def check(rule: Fused, blocks: list[torch.Tensor], fused: torch.Tensor, cut: Cut, at: int) -> None:
    """Compare with part tensors that were cut before they were fused."""
    (spans,) = local_boxes((len(fused),), [cut], (2,), (at,))
    rows = [fused[a:b] for _, (a, b) in spans]
    local = torch.cat(rows)
    for index, part in enumerate(blocks):
        found = rows_of_part(spans, len(fused), FusedPart(rule, index), "w")
        assert found.size == len(part)
        held = torch.cat([local[a:b] for a, b in found.take] or [local[:0]])
        at_home = torch.cat([part[a:b] for _, (a, b) in found.spans] or [part[:0]])
        assert torch.equal(held, at_home)
        assert [span.local[1] - span.local[0] for span in found.spans] == [
            b - a for a, b in found.take
        ]


PARTS = [torch.arange(12), 100 + torch.arange(6), 200 + torch.arange(6)]


@pytest.mark.parametrize("at", [0, 1])
def test_heads_kept_together(at: int) -> None:
    rule = Fused({"q": 2, "k": 1, "v": 1}, groups=3)
    fused = torch.cat([torch.cat([p.chunk(3)[g] for p in PARTS]) for g in range(3)])
    # Three groups over two ranks: the middle one is cut through.
    check(rule, PARTS, fused, Cut(0), at)


@pytest.mark.parametrize("at", [0, 1])
def test_one_block_per_rank(at: int) -> None:
    fused = torch.cat([torch.cat([p.chunk(2)[rank] for p in PARTS]) for rank in range(2)])
    check(Fused({"q": 2, "k": 1, "v": 1}), PARTS, fused, Cut(0), at)


@pytest.mark.parametrize("at", [0, 1])
def test_rows_cut_without_regard_to_the_parts(at: int) -> None:
    check(Fused({"q": 2, "k": 1, "v": 1}, groups=1), PARTS, torch.cat(PARTS), Cut(0), at)


@pytest.mark.parametrize("at", [0, 1])
def test_strided_shards_are_one_block_in_all(at: int) -> None:
    # What Megatron's partition_stride=2 says of [gate; up].
    parts = [torch.arange(6), 100 + torch.arange(6)]
    check(Fused({"gate": 1, "up": 1}), parts, torch.cat(parts), Cut(0, 2), at)


def test_the_two_ways_of_cutting_differ() -> None:
    """What ``groups`` says matters: the same rows belong to other parts."""
    (spans,) = local_boxes((24,), [Cut(0)], (2,), (0,))
    shares = {"q": 2, "k": 1, "v": 1}
    found = [
        rows_of_part(spans, 24, FusedPart(Fused(shares, groups=groups), 1), "w").take
        for groups in (None, 1, 6)
    ]
    assert found == [((6, 9),), (), ((2, 3), (6, 7), (10, 11))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": {"q": 1}}, "must name at least two parts"),
        ({"parts": {"q": 1, "k": 0}}, r"parts\['k'\]=0 must be a positive whole number"),
        ({"parts": {"q": 1, "k": True}}, r"parts\['k'\]=True must be"),
        ({"parts": {"q": 1, "k": 1}, "groups": 0}, "groups=0 must be at least 1"),
    ],
)
def test_wrong_rules(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fused(**arguments)


def test_rows_that_do_not_divide() -> None:
    part = FusedPart(Fused({"q": 2, "k": 1}), 0)
    with pytest.raises(ConfigError, match=r"names\['w'\]: 8 rows cannot be divided into 1 groups"):
        rows_of_part(whole((8,))[0], 8, part, "w")
    uneven = (Span((0, 5), (0, 5)),)
    with pytest.raises(ConfigError, match="holds 5 of 9 rows, which is no even share"):
        rows_of_part(uneven, 9, part, "w")
