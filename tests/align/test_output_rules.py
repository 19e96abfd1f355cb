from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from paralign.align.output_rules import OutputRules
from paralign.align.placements import Placed, RankAxes
from paralign.align.tensor_entry import Kind
from paralign.errors import ConfigError
from paralign.layout import Part, Span, whole


def axes_of(rank: int) -> RankAxes:
    """Axes of a rank in a world of dp=2 x tp=4."""
    at = [{"dp": r // 4, "tp": r % 4} for r in range(8)]
    axes = RankAxes({"dp": (at[rank]["dp"], 2), "tp": (at[rank]["tp"], 4)})
    axes.resolve(dict(enumerate(at)))
    return axes


def place(
    said: Any, *, rank: int = 2, kind: str = Kind.OUTPUT, grads: Any = None, shape: Any = (2, 3, 4)
) -> Placed:
    rules = OutputRules(axes_of(rank), {"*.wq": said}, {} if grads is None else {"*.wq": grads})
    rules.check()
    placed = rules.place(kind, "layers.0.wq", torch.zeros(shape))
    assert placed is not None
    return placed


def test_a_cut_dim_is_placed_by_the_ranks_coordinate():
    for said in (Shard(-1), 2, Part(dim=-1)):
        placed = place({"tp": said})
        assert placed.shape == (2, 3, 16)
        assert placed.map == (*whole((2, 3)), (Span((0, 4), (8, 12)),))
        assert (placed.replicated_over, placed.partial_over) == ((), ())


def test_neighbours_hold_one_part_where_there_are_fewer_than_ranks():
    head = Part(dim=2, num_parts=2)
    held = [place({"tp": head}, rank=rank).map[2][0].global_ for rank in range(4)]
    assert held == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert place({"tp": head}).shape == (2, 3, 8)


def test_what_is_whole_is_a_copy_and_what_is_a_summand_is_not():
    assert place({"tp": Replicate()}).replicated_over == ("tp",)
    summand = place({"tp": Partial()})
    assert (summand.replicated_over, summand.partial_over) == ((), ("tp",))
    assert summand.map == whole((2, 3, 4))


def test_a_gradient_lies_like_its_output_unless_something_else_is_said():
    grad: dict[str, Any] = {"kind": Kind.OUTPUT_GRAD}
    assert place({"tp": Shard(1)}, **grad).shape == (2, 12, 4)
    assert place({"tp": Partial()}, **grad).partial_over == ()
    assert place({"tp": Replicate()}, **grad, grads={"tp": Partial()}).partial_over == ("tp",)


def test_two_axes_may_cut():
    placed = place({"dp": Shard(0), "tp": Shard(2)}, rank=5)
    assert placed.shape == (4, 3, 16)
    assert [spans[0].global_ for spans in placed.map] == [(2, 4), (0, 3), (4, 8)]


def test_of_a_module_without_a_rule_nothing_is_said():
    rules = OutputRules(axes_of(0), {"*.wq": {"tp": 1}})
    assert rules.place(Kind.OUTPUT, "layers.0.wo", torch.zeros(2, 3)) is None
    assert rules.used(["layers.0.wq", "layers.0.wo"]) == {"*.wq"}
    assert rules.used(["head"]) == set()


def test_wrong_rules_are_refused_together():
    rules = OutputRules(axes_of(0), {"a": {"cp": 1}}, {"b": {"tp": "whole"}})
    with pytest.raises(ConfigError) as caught:
        rules.check()
    assert "outputs['a'] names 'cp', which is no axis of mesh= (dp, tp)" in str(caught.value)
    assert "output_grads['b']: 'whole' is no placement" in str(caught.value)
