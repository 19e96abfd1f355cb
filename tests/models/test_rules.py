"""Rules of sizes as sentences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paralign.models.rules import (
    did_you_mean,
    divide_problem,
    even_problem,
    seq_len_problem,
    size_problems,
    split_problem,
)


def test_sizes_are_judged_one_by_one():
    config = SimpleNamespace(a=0, b=True, c="4", d=3, e=0.0, f=float("nan"), g=float("inf"), h=1)
    found = size_problems(config, counts=["a", "b", "c", "d"], positive=["e", "f", "g", "h"])
    assert found == [
        "a=0 must be a whole number of at least 1",
        "b=True must be a whole number of at least 1",
        "c='4' must be a whole number of at least 1",
        "e=0.0 must be a number above 0",
        "f=nan must be a number above 0",
        "g=inf must be a number above 0",
    ]


def test_splits_name_axis_remainder_and_fixes():
    assert split_problem("num_heads", 6, 4, "tp") == [
        "num_heads=6 does not split evenly over axis 'tp' (4 ranks, remainder 2). Use tp in "
        "{1, 2, 3, 6} or num_heads=8."
    ]
    assert split_problem("num_heads", 8, 4, "tp") == []


def test_multiples_name_both_fields():
    assert divide_problem("hidden_size", 66, "num_heads", 4) == [
        "hidden_size=66 must be a multiple of num_heads=4 (remainder 2). Use hidden_size=68."
    ]
    assert divide_problem("hidden_size", 64, "num_heads", 4) == []


def test_odd_heads_cannot_be_turned():
    assert even_problem("qk_rope_head_dim", 7, "qk_rope_head_dim=8") == [
        "qk_rope_head_dim=7 must be even, since rotary positions turn pairs of features. Use "
        "qk_rope_head_dim=8."
    ]
    assert even_problem("qk_rope_head_dim", 8, "") == []


@pytest.mark.parametrize("seq_len", [1, 0, -4, True, 2.0])
def test_sequences_need_a_next_token(seq_len):
    assert seq_len_problem(seq_len) == [
        f"seq_len={seq_len!r} must be a whole number of at least 2: a single token has no next "
        "token to predict. Use seq_len=2 or more."
    ]


def test_sequences_of_two_are_fine():
    assert seq_len_problem(2) == []


def test_suggestions_stay_short():
    assert did_you_mean("num_layer", ["num_layers", "x"]) == "Did you mean 'num_layers'?"
    assert did_you_mean("zzz", ["a", "b"]) == "Use one of a, b."
    names = [f"name{index}" for index in range(10)]
    assert did_you_mean("zzz", names) == (
        "Use one of name0, name1, name2, name3, name4, name5, name6, name7 and 2 more."
    )
