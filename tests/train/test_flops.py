from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from paralign.parallel.stage import meta_copy
from paralign.train.flops import attended_pairs, count_flops
from tests.models.helpers import batch, tiny


def counted(name: str, *, rows: int = 2, seq_len: int = 16, **sizes: Any) -> tuple[int, int]:
    """Return the operations of forward and backward that torch counts, and ours for all pairs."""
    model, _, blueprint = tiny(name, **sizes)
    data = batch(rows, seq_len)
    # The kernel that computes every pair, and keeps the scores for its backward pass.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(data["tokens"]).sum().backward()
    flops = count_flops(meta_copy(model), blueprint, seq_len=seq_len)
    small = sum(p.numel() for p in model.parameters() if p.dim() == 1)  # no product for torch
    ours = flops.of(num_tokens=rows * seq_len, num_pairs=rows * seq_len * seq_len)
    return counter.get_total_flops(), ours - 6 * small * rows * seq_len


@pytest.mark.parametrize("name", ["llama", "pangu_moe"])
def test_the_count_is_that_of_the_products_that_torch_runs(name):
    theirs, ours = counted(name)
    assert ours == theirs > 1e6


def test_a_head_that_is_the_embedding_counts_and_an_embedding_does_not():
    theirs, ours = counted("llama", tie_embeddings=True)
    assert ours == theirs
    model, config, blueprint = tiny("llama")
    apart = count_flops(meta_copy(model), blueprint, seq_len=16)
    tied, _, _ = tiny("llama", tie_embeddings=True)
    together = count_flops(meta_copy(tied), blueprint, seq_len=16)
    assert together.per_token == apart.per_token
    size = config.vocab_size * config.hidden_size
    assert together.active_parameters == apart.active_parameters - size


def test_a_frozen_weight_has_no_gradient_to_compute():
    model, config, blueprint = tiny("llama")
    before = count_flops(meta_copy(model), blueprint, seq_len=16)
    model.get_submodule("layers.1.ffn.up").requires_grad_(False)
    after = count_flops(meta_copy(model), blueprint, seq_len=16)
    gone = 2 * config.hidden_size * config.ffn_hidden_size
    assert after.per_token == before.per_token - gone
    assert after.per_pair == before.per_pair


def test_a_token_passes_only_the_experts_it_is_sent_to():
    model, config, blueprint = tiny("llama", "mixtral_tiny", num_experts=8, top_k=3)
    flops = count_flops(meta_copy(model), blueprint, seq_len=16)
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    assert experts == config.num_layers * 8 * 3 * config.hidden_size * config.expert_hidden_size
    assert flops.has_experts
    assert flops.active_parameters == rest + experts * 3 // 8
    looked_up = config.vocab_size * config.hidden_size
    assert flops.per_token == 6 * (flops.active_parameters - looked_up)


def test_counting_leaves_no_hook_behind():
    model, _, blueprint = tiny("llama", "mixtral_tiny")
    skeleton = meta_copy(model)
    count_flops(skeleton, blueprint, seq_len=16)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in skeleton.modules())


def test_pairs_are_those_of_the_mask():
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    assert attended_pairs({"tokens": tokens}) == 2 * 21
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [7, 7, 7, 7, 7, 7]])
    pairs = attended_pairs({"tokens": tokens, "documents": documents})
    assert pairs == 3 + 6 + 1 + 21
