from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from paralign.align.fused import Fused, FusedPart
from paralign.align.local_layout import HeldPiece, LocalLayouts, compose
from paralign.align.names import NamedParameter
from paralign.align.placements import RankAxes
from paralign.align.shard_rules import ShardRules
from paralign.align.sources.choose import readers_of
from paralign.layout import LocalMap, Span, boxes, local_boxes


class Cut:
    def __init__(self, dim: int, split_factor: int = 1) -> None:
        self.dim, self.split_factor = dim, split_factor


def take(tensor: torch.Tensor, local_map: LocalMap) -> torch.Tensor:
    """Return what ``local_map`` says a rank holds of ``tensor``, one dim after the other."""
    for dim, spans in enumerate(local_map):
        rows = [i for span in spans for i in range(*span.global_)]
        tensor = tensor.index_select(dim, torch.tensor(rows, dtype=torch.int64))
    return tensor


@pytest.mark.parametrize("factor", [1, 2])
def test_a_piece_of_a_piece(factor: int) -> None:
    whole = torch.arange(12 * 5).view(12, 5)
    for tp, dp in itertools.product(range(2), range(3)):
        outer = local_boxes((12, 5), [Cut(0, factor)], (2,), (tp,))
        inner = local_boxes((6, 5), [Cut(0)], (3,), (dp,))
        expected = take(take(whole, outer), inner)
        assert torch.equal(take(whole, compose(outer, inner)), expected)


def named(parameter: nn.Parameter, part: FusedPart | None = None) -> NamedParameter:
    return NamedParameter("w", (), "w", parameter, nn.Module(), "", None, part)


def test_views_of_a_fused_part_are_written_through() -> None:
    rule = Fused({"q": 2, "k": 1}, groups=2)
    fused = nn.Parameter(torch.arange(12.0).view(6, 2))
    layouts = LocalLayouts(RankAxes(), ShardRules(readers_of("torch")))
    (piece,) = layouts.place(named(fused, FusedPart(rule, 1)), fused)
    assert piece.shape == (2, 2)
    assert piece.tensor.tolist() == [[4.0, 5.0], [10.0, 11.0]]
    with torch.no_grad():
        for view, box in piece.views():
            view.fill_(-1.0 - box.start[0])
    assert fused[:, 0].tolist() == [0.0, 2.0, -1.0, 6.0, 8.0, -2.0]


def test_owned_ranges_are_boxes_of_the_tensor() -> None:
    parameter = nn.Parameter(torch.arange(10.0).view(2, 5))
    layouts = LocalLayouts(RankAxes(), ShardRules(readers_of("torch")))
    for tensor in (parameter, parameter.detach().flatten()[3:9]):
        pieces = layouts.place(named(parameter), tensor, owned=(3, 9))
        whole = torch.full((2, 5), -1.0)
        for piece in pieces:
            ((view, box),) = piece.views()
            region = zip(box.start, box.shape, strict=True)
            whole[tuple(slice(a, a + n) for a, n in region)] = view
        assert whole.flatten().tolist() == [-1, -1, -1, 3, 4, 5, 6, 7, 8, -1]


def test_a_part_that_is_not_here_is_empty() -> None:
    base = torch.ones(4, 3)
    piece = HeldPiece(base, (2, 3), ((), (Span((0, 3), (0, 3)),)), take=())
    assert piece.tensor.shape == (0, 3)
    assert piece.views() == []
    assert boxes(piece.map) == []
