"""A decoder with multi-head latent attention and experts. Knows nothing of meshes.

Queries come from one narrow latent, keys and values from another. Position enters through a few
extra features: rotary queries per head, and one rotary key that all heads share::

    x -> q_down -> q_norm -> q_up ---------------------> [ q_nope | q_rope* ]   per head
    x -> kv_down -> [ latent -> kv_norm -> kv_up ------> [ k_nope ] [ v ]       per head
                    | k_rope* ]                          one for all heads
    (* turned by position)

Ref:
    DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paralign.documents import document_mask, positions_inside
from paralign.dropout import dropped, name_dropouts, optional_dropout
from paralign.errors import ConfigError
from paralign.loss import Predicted
from paralign.models.attention import CausalAttention
from paralign.models.feed_forward import SwiGLU
from paralign.models.moe import MoE, feed_forward
from paralign.models.pangu_moe.presets import PanguMoeConfig
from paralign.models.rotary import Rotary, apply_rotary, default_positions, rotary_tables


class LatentAttention(nn.Module):
    """Multi-head latent self-attention with decoupled rotary positions."""

    def __init__(self, config: PanguMoeConfig) -> None:
        super().__init__()
        self.config = config
        hidden, heads, bias = config.hidden_size, config.num_heads, config.bias
        self.q_down = nn.Linear(hidden, config.q_lora_rank, bias=bias)
        self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=config.norm_eps)
        self.q_up = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=bias)
        self.kv_down = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps=config.norm_eps)
        kv_width = config.qk_nope_head_dim + config.v_head_dim
        self.kv_up = nn.Linear(config.kv_lora_rank, heads * kv_width, bias=bias)
        self.rotary_key = nn.Identity()  # a name for the one key that all heads share
        self.out = nn.Linear(heads * config.v_head_dim, hidden, bias=bias)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        """Map ``[B, S, hidden_size]`` to the same shape; a mask is causal by itself."""
        attended = self.core(*self.project(x, rotary), mask=mask, is_causal=mask is None)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values, each ``[B, heads, S, its own width]``."""
        return self._queries(x, rotary), *self._keys_and_values(x, rotary)

    def _queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        c = self.config
        q = _split_heads(self.q_up(self.q_norm(self.q_down(x))), c.qk_head_dim)
        nope, rope = torch.split(q, [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat((nope, apply_rotary(rope, rotary)), dim=-1)

    def _keys_and_values(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        c = self.config
        latent, rope = torch.split(self.kv_down(x), [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        width = c.qk_nope_head_dim + c.v_head_dim
        kv = _split_heads(self.kv_up(self.kv_norm(latent)), width)
        nope, v = torch.split(kv, [c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        # The one rotary key serves every head.
        rope = apply_rotary(self.rotary_key(rope).unsqueeze(1), rotary)
        return torch.cat((nope, rope.expand(-1, nope.shape[1], -1, -1)), dim=-1), v


def _split_heads(x: Tensor, width: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, width).transpose(1, 2)  # [B, N, S, D]


class Layer(nn.Module):
    """Latent attention and a feed-forward, each on a normed input and added to the stream."""

    def __init__(self, config: PanguMoeConfig, *, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = LatentAttention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = (
            MoE(config.hidden_size, config, bias=config.bias)
            if has_experts
            else SwiGLU(config.hidden_size, config.ffn_hidden_size, bias=config.bias)
        )
        self.attention_dropout = optional_dropout(config.dropout, config.hidden_size)
        self.ffn_dropout = optional_dropout(config.dropout, config.hidden_size)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary,
        predicted: Predicted | None = None,
        mask: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        """Map ``[B, S, hidden_size]`` to the same shape.

        Experts need ``predicted``, and dropout ``draws``.
        """
        attended = self.attention(self.attention_norm(x), rotary, mask)
        x = x + dropped(self.attention_dropout, attended, draws)
        computed = feed_forward(self.ffn, self.ffn_norm(x), predicted)
        return x + dropped(self.ffn_dropout, computed, draws)


class PanguMoe(nn.Module):
    """The whole decoder.

    Raises:
        ConfigError: The config breaks a rule of its own; all are listed.
    """

    def __init__(self, config: PanguMoeConfig) -> None:
        super().__init__()
        if problems := config.problems():
            raise ConfigError.from_problems("cannot build a pangu_moe model", problems)
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_dropout = optional_dropout(config.dropout, config.hidden_size)
        self.layers = nn.ModuleList(
            Layer(config, has_experts=config.is_moe_layer(index))
            for index in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.bias)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        name_dropouts(self)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        predicted: Predicted | None = None,
        documents: Tensor | None = None,
        draws: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token of every position.

        Shapes:
            tokens: ``[B, S]`` int64.
            positions: ``[B, S]`` int64, global; None: whole sequences, ``0 .. S-1``.
            predicted: Which of the tokens are; None: experts are neither counted nor balanced.
            documents: ``[B, S]``, where the document of each token begins, so that attention stays
                inside; None: a row is one document. See ``documents.py``.
            draws: ``[B, S]``, what dropout is drawn by, see ``dropout.py``; needed in training mode
                with dropout.
            returns: logits ``[B, S, vocab_size]``.
        """
        positions = default_positions(tokens) if positions is None else positions
        rotary = pangu_rotary(self.config, positions_inside(positions, documents))
        mask = document_mask(documents)
        x = dropped(self.embedding_dropout, self.embedding(tokens), draws)
        for layer in self.layers:
            x = layer(x, rotary, predicted, mask, draws)
        logits: Tensor = self.head(self.norm(x))
        return logits


def pangu_rotary(config: PanguMoeConfig, positions: Tensor) -> Rotary:
    """Return the tables that turn the rotary features by each token's position ``[B, S]``."""
    return rotary_tables(positions, head_dim=config.qk_rope_head_dim, theta=config.rope_theta)
