"""Static rules of pangu_moe sizes, alone and on a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paralign.mesh import Degrees
from paralign.models.pangu_moe.presets import PRESETS, problems, tiny, tiny_dense


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_keep_every_rule(name):
    config = PRESETS[name]()
    assert problems(config, Degrees(pp=2, dp_shard=2, cp=2, tp=2), 64) == []


def test_every_query_head_has_its_own_key_head():
    assert tiny().num_kv_heads == tiny().num_heads == 4
    assert tiny().qk_head_dim == 24


def test_sizes_that_are_no_counts_are_listed():
    config = replace(tiny(), q_lora_rank=0, v_head_dim=0, qk_rope_head_dim=7)
    assert problems(config, Degrees(tp=3), 0) == [
        "q_lora_rank=0 must be a whole number of at least 1",
        "v_head_dim=0 must be a whole number of at least 1",
        "seq_len=0 must be a whole number of at least 2: a single token has no next token to "
        "predict. Use seq_len=2 or more.",
    ]


def test_rotary_features_come_in_pairs():
    assert problems(replace(tiny(), qk_rope_head_dim=7), Degrees(), 64) == [
        "qk_rope_head_dim=7 must be even, since rotary positions turn pairs of features. Use "
        "qk_rope_head_dim=8."
    ]


def test_tensor_parallel_needs_whole_heads():
    assert problems(tiny_dense(), Degrees(tp=3), 64) == [
        "num_heads=4 does not split evenly over axis 'tp' (3 ranks, remainder 1). Use tp in "
        "{1, 2, 4} or num_heads=6.",
        "ffn_hidden_size=128 does not split evenly over axis 'tp' (3 ranks, remainder 2). Use tp "
        "in {1, 2, 4, 8, 16, 32, 64, 128} or ffn_hidden_size=129.",
        "vocab_size=256 does not split evenly over axis 'tp' (3 ranks, remainder 1). Use tp in "
        "{1, 2, 4, 8, 16, 32, 64, 128, 256} or vocab_size=258.",
    ]
