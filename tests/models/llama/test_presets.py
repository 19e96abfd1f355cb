"""Static rules of llama sizes, alone and on a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paralign.mesh import Degrees
from paralign.models.llama.presets import PRESETS, problems, tiny


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_keep_every_rule(name):
    config = PRESETS[name]()
    assert problems(config, Degrees(pp=2, dp_shard=2, cp=2, tp=2), 64) == []


def test_sizes_that_are_no_counts_are_listed_together_and_alone():
    config = replace(tiny(), num_layers=0, num_heads=-4, rope_theta=0.0)
    assert problems(config, Degrees(tp=3), 64) == [
        "num_layers=0 must be a whole number of at least 1",
        "num_heads=-4 must be a whole number of at least 1",
        "rope_theta=0.0 must be a number above 0",
    ]


def test_heads_must_divide_and_be_even():
    assert problems(replace(tiny(), hidden_size=60, num_heads=4), Degrees(), 64) == [
        "hidden_size / num_heads=15 must be even, since rotary positions turn pairs of features. "
        "Use hidden_size=64."
    ]
    assert problems(replace(tiny(), hidden_size=62, num_kv_heads=3), Degrees(), 1) == [
        "hidden_size=62 must be a multiple of num_heads=4 (remainder 2). Use hidden_size=64.",
        "num_heads=4 must be a multiple of num_kv_heads=3 (remainder 1). Use num_heads=6.",
        "seq_len=1 must be a whole number of at least 2: a single token has no next token to "
        "predict. Use seq_len=2 or more.",
    ]


def test_tensor_parallel_needs_whole_heads():
    assert problems(replace(tiny(), ffn_hidden_size=130), Degrees(tp=8), 64) == [
        "num_heads=4 does not split evenly over axis 'tp' (8 ranks, remainder 4). Use tp in "
        "{1, 2, 4} or num_heads=8.",
        "ffn_hidden_size=130 does not split evenly over axis 'tp' (8 ranks, remainder 2). Use tp "
        "in {1, 2, 5, 10, 13, 26, 65, 130} or ffn_hidden_size=136.",
    ]


def test_fewer_key_heads_than_ranks_can_be_replicated():
    assert problems(tiny(), Degrees(tp=4), 64) == []
    config = replace(tiny(), num_heads=12, num_kv_heads=6, hidden_size=96)
    assert problems(config, Degrees(tp=4), 64) == [
        "num_kv_heads=6 and axis 'tp' (4 ranks): one must be a multiple of the other, so that "
        "every rank has the key/value heads of its query heads. Use tp in {1, 2, 3} or "
        "num_kv_heads=4."
    ]
