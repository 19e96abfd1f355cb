"""Sizes of the pangu_moe family, and the rules that a size must keep. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from paralign.mesh import Degrees
from paralign.models.moe_sizes import MoeSizes, expert_parallel_problems
from paralign.models.rules import (
    even_problem,
    seq_len_problem,
    share_problem,
    size_problems,
    split_problem,
)


@dataclass(frozen=True, kw_only=True)
class PanguMoeConfig(MoeSizes):
    """Hyper-parameters of a pangu_moe decoder; each can be set in RUN.yaml by its name."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    q_lora_rank: int  # width of the latent that queries are made from
    kv_lora_rank: int  # width of the latent that keys and values are made from
    qk_nope_head_dim: int  # features of a query and key head without position
    qk_rope_head_dim: int  # features with rotary position; all heads share one rotary key
    v_head_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # one parameter for embedding and head
    bias: bool = False  # on every linear layer, the head included
    init_std: float = 0.02
    dropout: float = 0.0  # after embedding, attention and feed-forward, in training

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values: every query head has its own."""
        return self.num_heads

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def problems(self) -> list[str]:
        """Return every rule this config breaks by itself, one sentence each."""
        counts = ["num_layers", "hidden_size", "ffn_hidden_size", "num_heads"]
        counts += ["q_lora_rank", "kv_lora_rank"]
        counts += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size"]
        positive = ("rope_theta", "norm_eps", "init_std")
        if found := size_problems(self, counts=counts, positive=positive):
            return found
        fix = f"qk_rope_head_dim={self.qk_rope_head_dim + 1}"
        return [
            *even_problem("qk_rope_head_dim", self.qk_rope_head_dim, fix),
            *share_problem("dropout", self.dropout),
            *self.moe_problems(),
        ]


def tiny_dense() -> PanguMoeConfig:
    """Return a size for tests without experts: milliseconds a step."""
    return PanguMoeConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_heads=4,
        q_lora_rank=32,
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        vocab_size=256,
    )


def tiny() -> PanguMoeConfig:
    """Return a size for tests: milliseconds a step."""
    return replace(
        tiny_dense(),
        num_experts=8,
        top_k=2,
        expert_hidden_size=32,
        shared_hidden_size=32,
        **ROUTING,
    )


def demo() -> PanguMoeConfig:
    """Return two wide layers, one of them with 16 experts, with biases: 19 million parameters."""
    return PanguMoeConfig(
        num_layers=2,
        hidden_size=256,
        ffn_hidden_size=6144,
        num_heads=32,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        vocab_size=1000,
        bias=True,
        num_experts=16,
        top_k=4,
        expert_hidden_size=512,
        shared_hidden_size=1024,
        **ROUTING,
    )


def full() -> PanguMoeConfig:
    """Return the full size, for a cluster: 45 layers, 192 experts in all but the first."""
    return PanguMoeConfig(
        num_layers=45,
        hidden_size=2560,
        ffn_hidden_size=6144,
        num_heads=32,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        vocab_size=153_600,
        bias=True,
        num_experts=192,
        top_k=10,
        expert_hidden_size=512,
        shared_hidden_size=1024,
        **ROUTING,
    )


# Of every preset with experts.
ROUTING: Mapping[str, Any] = MappingProxyType(
    {
        "num_dense_layers": 1,
        "router_score": "sigmoid",
        "router_normalise": "softmax",
        "router_scaling": 2.5,
        "balance_loss": 0.0002,
        "bias_update_speed": 0.001,
    }
)
PRESETS = {"tiny": tiny, "tiny_dense": tiny_dense, "demo": demo, "full": full}


def problems(config: PanguMoeConfig, degrees: Degrees, seq_len: int) -> list[str]:
    """Return every static rule that ``config`` breaks, alone or on this mesh, one sentence each."""
    if found := [*config.problems(), *seq_len_problem(seq_len)]:
        return found
    return [
        *split_problem("num_heads", config.num_heads, degrees.tp, "tp"),
        *split_problem("ffn_hidden_size", config.ffn_hidden_size, degrees.tp, "tp"),
        *split_problem("vocab_size", config.vocab_size, degrees.tp, "tp"),
        *expert_parallel_problems(config, degrees),
    ]
