"""Sizes of the llama family, and the rules that a size must keep. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paralign.mesh import Degrees
from paralign.models.moe_sizes import MoeSizes, expert_parallel_problems
from paralign.models.rules import (
    divide_problem,
    even_problem,
    seq_len_problem,
    share_problem,
    shared_heads_problem,
    size_problems,
    split_problem,
)


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(MoeSizes):
    """Hyper-parameters of a llama decoder; each can be set in RUN.yaml by its name."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int  # each serves num_heads / num_kv_heads neighbouring query heads
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False  # one parameter for embedding and head
    bias: bool = False  # on every linear layer, the head included
    init_std: float = 0.02
    dropout: float = 0.0  # after embedding, attention and feed-forward, in training

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    def problems(self) -> list[str]:
        """Return every rule this config breaks by itself, one sentence each."""
        counts = ["num_layers", "hidden_size", "ffn_hidden_size"]
        counts += ["num_heads", "num_kv_heads", "vocab_size"]
        positive = ("rope_theta", "norm_eps", "init_std")
        if found := size_problems(self, counts=counts, positive=positive):
            return found  # the rules below divide by these numbers
        heads = divide_problem("hidden_size", self.hidden_size, "num_heads", self.num_heads)
        return [
            *(heads or even_problem("hidden_size / num_heads", self.head_dim, self._even_fix())),
            *divide_problem("num_heads", self.num_heads, "num_kv_heads", self.num_kv_heads),
            *share_problem("dropout", self.dropout),
            *self.moe_problems(),
        ]

    def _even_fix(self) -> str:
        return f"hidden_size={self.num_heads * (self.head_dim + 1)}"


def tiny() -> LlamaConfig:
    """Return a size for tests: milliseconds a step."""
    return LlamaConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=256,
    )


def small() -> LlamaConfig:
    """Return about 13 million parameters over bytes: trains on a laptop."""
    return LlamaConfig(
        num_layers=8,
        hidden_size=384,
        ffn_hidden_size=1024,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=256,
    )


def one_billion() -> LlamaConfig:
    """Return the shape of the published 1B model of the third generation."""
    return LlamaConfig(
        num_layers=16,
        hidden_size=2048,
        ffn_hidden_size=8192,
        num_heads=32,
        num_kv_heads=8,
        vocab_size=128_256,
        rope_theta=500_000.0,
        tie_embeddings=True,
    )


def mixtral_tiny() -> LlamaConfig:
    """Return the tiny size with eight experts in every layer, two to a token."""
    return replace(
        tiny(),
        num_experts=8,
        top_k=2,
        expert_hidden_size=64,
        balance_loss=0.02,
    )


PRESETS = {"tiny": tiny, "small": small, "1b": one_billion, "mixtral_tiny": mixtral_tiny}


def problems(config: LlamaConfig, degrees: Degrees, seq_len: int) -> list[str]:
    """Return every static rule that ``config`` breaks, alone or on this mesh, one sentence each."""
    if found := [*config.problems(), *seq_len_problem(seq_len)]:
        return found
    tp = degrees.tp
    return [
        *split_problem("num_heads", config.num_heads, tp, "tp"),
        *shared_heads_problem(config.num_kv_heads, tp),
        *split_problem("ffn_hidden_size", config.ffn_hidden_size, tp, "tp"),
        *split_problem("vocab_size", config.vocab_size, tp, "tp"),
        *expert_parallel_problems(config, degrees),
    ]
