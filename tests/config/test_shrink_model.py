from __future__ import annotations

from dataclasses import fields, replace

import pytest

from paralign.config.shrink_model import WIDTHS, Split, small_sizes
from paralign.mesh import Degrees
from paralign.models.registry import MODELS

FULL = MODELS["pangu_moe"].presets["full"]()
LLAMA = MODELS["llama"].presets["1b"]()


def shrunk(sizes, large, small, *, inner=None):
    before, after = Degrees(**large), Degrees(**small)
    inner = inner or (before.cp, after.cp)
    found = small_sizes(
        sizes, Split(degrees=before, inner=inner[0]), Split(degrees=after, inner=inner[1])
    )
    copy = replace(sizes, **found)
    assert copy.problems() == []
    return copy


def test_every_whole_number_of_every_model_is_shrunk_or_known_to_stay():
    elsewhere = {"num_layers", "num_dense_layers"}  # with the pipeline
    for entry in MODELS.values():
        sizes = entry.presets["tiny"]()
        wholes = {f.name for f in fields(sizes) if type(getattr(sizes, f.name)) is int}
        large = replace(
            sizes,
            **{w: 64 for w in WIDTHS if w in wholes},
            num_experts=64,
            num_expert_groups=8,
            num_limited_groups=4,
            top_k=8,
            vocab_size=1024,
        )
        changed = small_sizes(
            large,
            Split(degrees=Degrees(), inner=1),
            Split(degrees=Degrees(), inner=1),
        )
        assert set(changed) == wholes - elsewhere, entry.name


def test_widths_keep_their_order_and_stay_equal_where_they_are():
    small = shrunk(FULL, {"dp_shard": 16, "cp": 4}, {"dp_shard": 2, "cp": 2})
    for first in WIDTHS:
        for second in WIDTHS:
            before = getattr(FULL, first) - getattr(FULL, second)
            after = getattr(small, first) - getattr(small, second)
            assert (before > 0, before == 0) == (after > 0, after == 0), (first, second)
    assert small.hidden_size <= 32


@pytest.mark.parametrize("vocab_size", [32_000, 32_001, 32_002, 32_004])
def test_what_does_not_divide_over_tp_and_fsdp_still_does_not(vocab_size):
    sizes = replace(LLAMA, vocab_size=vocab_size)
    small = shrunk(sizes, {"dp_shard": 4, "tp": 1}, {"dp_shard": 4, "tp": 1})
    assert (small.vocab_size % 4 == 0) == (vocab_size % 4 == 0)
    assert small.vocab_size % 2 == vocab_size % 2
    assert 256 <= small.vocab_size < 264


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "cp"),
    [(32, 8, 16, 8), (32, 8, 4, 1), (32, 32, 8, 4), (64, 1, 8, 8), (32, 4, 4, 8), (48, 8, 8, 2)],
)
def test_keys_are_shared_over_tp_and_repeated_over_cp_as_before(heads, kv_heads, tp, cp):
    sizes = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads, hidden_size=heads * 64)
    inner = min(cp, heads // tp)
    small = shrunk(
        sizes, {"tp": tp, "cp": cp}, {"tp": 2, "cp": min(cp, 2)}, inner=(inner, min(inner, 2))
    )
    shared, repeated = small.num_kv_heads < 2, max(1, small.num_kv_heads // 2) % min(inner, 2) != 0
    assert shared == (kv_heads < tp)
    assert repeated == (max(1, kv_heads // tp) % inner != 0)
    queries = small.num_heads // small.num_kv_heads
    assert queries == heads // kv_heads or (heads // kv_heads > 8 and queries >= 4)
    assert small.num_heads <= 16


def test_routing_stays_what_it_is():
    small = shrunk(FULL, {"dp_shard": 16, "cp": 4, "ep": 32}, {"dp_shard": 2, "cp": 2, "ep": 2})
    assert 1 < small.top_k < small.num_experts <= 16
    assert small.num_experts % 2 == 0
    assert (small.num_experts // 2) % 2 == 0  # over efsdp, as 192 / 32 over 2
    assert small.router_score == FULL.router_score

    grouped = replace(FULL, num_expert_groups=8, num_limited_groups=3, num_experts=96, top_k=6)
    small = shrunk(grouped, {"dp_shard": 32, "ep": 32}, {"dp_shard": 2, "ep": 2})
    assert 1 < small.num_limited_groups < small.num_expert_groups
    assert small.top_k < small.num_experts // small.num_expert_groups * small.num_limited_groups

    everything = replace(FULL, num_experts=8, top_k=8)
    small = shrunk(everything, {"dp_shard": 2}, {"dp_shard": 2})
    assert small.top_k == small.num_experts == 4
