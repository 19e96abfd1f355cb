"""Rules that the sizes of a mixture of experts keep, alone and on a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paralign.mesh import Degrees
from paralign.models.moe_sizes import MoeSizes, expert_parallel_problems

SIZES = MoeSizes(num_experts=8, top_k=2, expert_hidden_size=16)


def test_which_layers_have_experts():
    sizes = replace(SIZES, num_dense_layers=2)
    assert [sizes.is_moe_layer(i) for i in range(4)] == [False, False, True, True]
    assert not MoeSizes().has_experts and not MoeSizes().is_moe_layer(3)


def test_sizes_without_experts_and_with_them_are_fine():
    assert MoeSizes().moe_problems() == SIZES.moe_problems() == []
    limited = replace(SIZES, num_expert_groups=4, num_limited_groups=1)
    assert limited.moe_problems() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ({"expert_hidden_size": 0}, "expert_hidden_size=0 must be a whole number of at least 1"),
        ({"num_experts": -1}, "num_experts=-1 must be a whole number of at least 0"),
        ({"router_score": "tanh"}, "router_score='tanh' must be one of softmax, sigmoid"),
        ({"balance_loss": -0.1}, "balance_loss=-0.1 must be a number of at least 0"),
        (
            {"bias_update_speed": float("inf")},
            "bias_update_speed=inf must be a number of at least 0",
        ),
        ({"router_scaling": 0}, "router_scaling=0 must be a number above 0"),
        (
            {"top_k": 9},
            "top_k=9 is more than the 8 experts that a token can reach (num_experts=8, 1 of 1 "
            "groups). Use top_k=8 or less.",
        ),
        (
            {"top_k": 3, "num_expert_groups": 4},
            "top_k=3 is more than the 2 experts that a token can reach (num_experts=8, 1 of 4 "
            "groups). Use top_k=2 or less.",
        ),
        (
            {"num_expert_groups": 3},
            "num_experts=8 must be a multiple of num_expert_groups=3 (remainder 2). "
            "Use num_experts=9.",
        ),
        (
            {"num_limited_groups": 2},
            "num_limited_groups=2 is more than num_expert_groups=1. Use num_limited_groups=1, "
            "which limits nothing, or fewer.",
        ),
        (
            {"router_normalise": "softmax"},
            "router_normalise=softmax takes a softmax of the selected scores, which with "
            "router_score=softmax are probabilities already. Use router_normalise=sum, or "
            "router_score=sigmoid.",
        ),
    ],
)
def test_a_broken_rule_is_named(changes, problem):
    assert replace(SIZES, **changes).moe_problems() == [problem]


def test_choices_that_nothing_reads_are_refused():
    assert MoeSizes(shared_hidden_size=4, balance_loss=0.1).moe_problems() == [
        "shared_hidden_size, balance_loss say how experts work, but num_experts=0: no layer has "
        "any. Use num_experts=8, say, or a preset without experts."
    ]


def test_experts_split_evenly_over_ep():
    assert expert_parallel_problems(SIZES, Degrees(dp_shard=4, ep=4)) == []
    assert expert_parallel_problems(SIZES, Degrees(dp_shard=3, ep=3)) == [
        "num_experts=8 does not split evenly over axis 'ep' (3 ranks, remainder 2). Use ep in "
        "{1, 2, 4, 8} or num_experts=9."
    ]
    assert expert_parallel_problems(MoeSizes(), Degrees(dp_shard=2, ep=2)) == [
        "ep=2 splits experts, but num_experts=0: no layer has any. Use ep=1."
    ]
