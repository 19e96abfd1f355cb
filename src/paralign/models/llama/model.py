"""A llama decoder: grouped-query attention, rotary positions, SwiGLU or experts, RMSNorm.

A plain module that knows nothing of meshes.

Ref:
    Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023.
    https://arxiv.org/abs/2302.13971
    Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
    Checkpoints", 2023. https://arxiv.org/abs/2305.13245
    Jiang et al., "Mixtral of Experts", 2024. https://arxiv.org/abs/2401.04088
"""

from __future__ import annotations

from torch import Tensor, nn

from paralign.documents import document_mask, positions_inside
from paralign.dropout import dropped, name_dropouts, optional_dropout
from paralign.errors import ConfigError
from paralign.loss import Predicted
from paralign.models.attention import CausalAttention
from paralign.models.feed_forward import SwiGLU
from paralign.models.llama.presets import LlamaConfig
from paralign.models.moe import MoE, feed_forward
from paralign.models.rotary import Rotary, apply_rotary, default_positions, rotary_tables


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, kv_width = config.hidden_size, config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(hidden, hidden, bias=config.bias)
        self.wk = nn.Linear(hidden, kv_width, bias=config.bias)
        self.wv = nn.Linear(hidden, kv_width, bias=config.bias)
        self.wo = nn.Linear(hidden, hidden, bias=config.bias)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor | None = None) -> Tensor:
        """Map ``[B, S, hidden_size]`` to the same shape; a mask is causal by itself."""
        attended = self.core(*self.project(x, rotary), mask=mask, is_causal=mask is None)
        out: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return out

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values, each ``[B, heads, S, head_dim]``."""
        q = apply_rotary(self._split_heads(self.wq(x)), rotary)
        k = apply_rotary(self._split_heads(self.wk(x)), rotary)
        return q, k, self._split_heads(self.wv(x))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)  # [B, N, S, D]


class Layer(nn.Module):
    """Attention and feed-forward, each on a normed input and added to the residual stream."""

    def __init__(self, config: LlamaConfig, *, has_experts: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
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


class Llama(nn.Module):
    """The whole decoder.

    Raises:
        ConfigError: The config breaks a rule of its own; all are listed.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if problems := config.problems():
            raise ConfigError.from_problems("cannot build a llama model", problems)
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
        rotary = llama_rotary(self.config, positions_inside(positions, documents))
        mask = document_mask(documents)
        x = dropped(self.embedding_dropout, self.embedding(tokens), draws)
        for layer in self.layers:
            x = layer(x, rotary, predicted, mask, draws)
        logits: Tensor = self.head(self.norm(x))
        return logits


def llama_rotary(config: LlamaConfig, positions: Tensor) -> Rotary:
    """Return the tables that turn each head by its token's position ``[B, S]``."""
    return rotary_tables(positions, head_dim=config.head_dim, theta=config.rope_theta)
