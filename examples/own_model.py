"""A model of your own, and the short blueprint that lets paralign run and check it.

The model is written as if for one device: it computes in [S, B, hidden], builds its mask and
transposes inside ``forward``, has biases everywhere and knows no positions but the mask's. Nothing
in it mentions paralign, except that the attention core is a module by itself, so that context
parallel finds it.

    paralign align examples/own_model.yaml
"""

# torch types a call of a module as Any; a model of your own need not care.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paralign as pa
from paralign.blueprint import Batch


class AttentionCore(nn.Module):
    """Scores, mask, softmax, sum; all [B, heads, S, head_dim]. The mask is global: [S, S]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Let every query attend to the keys whose mask is not 0."""
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(mask == 0, -1e9)
        return torch.matmul(F.softmax(scores, dim=-1), v)


class Attention(nn.Module):
    """Low-rank queries, and low-rank keys and values from one projection."""

    def __init__(self, hidden_size: int, num_heads: int, rank: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_down = nn.Linear(hidden_size, rank)
        self.q_up = nn.Linear(rank, hidden_size)
        self.kv_down = nn.Linear(hidden_size, rank)
        self.kv_up = nn.Linear(rank, 2 * hidden_size)
        self.core = AttentionCore()
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [S, B, hidden] to the same shape."""
        q = self.split_heads(self.q_up(self.q_down(x)))
        k, v = self.kv_up(self.kv_down(x)).chunk(2, dim=-1)
        mixed = self.core(q, self.split_heads(k), self.split_heads(v), mask=mask)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(2))

    def split_heads(self, x: Tensor) -> Tensor:
        """Turn [S, B, hidden] into [B, heads, S, head_dim]."""
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)


class Block(nn.Module):
    """Attention and a gated feed-forward, each on a normed input and added to the stream."""

    def __init__(self, hidden_size: int, num_heads: int, rank: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden_size, eps=1e-5)
        self.attention = Attention(hidden_size, num_heads, rank)
        self.norm2 = nn.RMSNorm(hidden_size, eps=1e-5)
        self.gate = nn.Linear(hidden_size, 2 * hidden_size)
        self.up = nn.Linear(hidden_size, 2 * hidden_size)
        self.down = nn.Linear(2 * hidden_size, hidden_size)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map [S, B, hidden] to the same shape."""
        x = x + self.attention(self.norm1(x), mask)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OwnModel(nn.Module):
    """The whole decoder."""

    def __init__(self, *, num_layers: int, hidden_size: int, num_heads: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, rank) for _ in range(num_layers))
        self.final_norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(hidden_size, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, S] to logits [B, S, 256]."""
        x = self.embedding(tokens).transpose(0, 1)
        seq_len = tokens.shape[1]
        mask = torch.tril(torch.ones(seq_len, seq_len, device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.lm_head(self.final_norm(x).transpose(0, 1))


def build(
    num_layers: int = 4, hidden_size: int = 64, num_heads: int = 4, rank: int = 32
) -> nn.Module:
    """Build the model; its hyper-parameters can be set in the YAML file, beside ``build``."""
    return OwnModel(num_layers=num_layers, hidden_size=hidden_size, num_heads=num_heads, rank=rank)


class OwnBlueprint(pa.Blueprint):
    """What paralign must know: the pieces of ``forward``, in order, and where attention is."""

    prologue_names = ("embedding",)
    layers_name = "blocks"
    epilogue_names = ("final_norm", "lm_head")
    head_name = "lm_head"
    stream_sources = ("embedding",)
    stream_readers = ("blocks.*.norm1", "blocks.*.norm2", "final_norm")

    def context(self, batch: Batch, *, seq_len: int) -> Tensor:  # noqa: D102
        # Global, whatever slice of the sequence this rank holds.
        return torch.tril(torch.ones(seq_len, seq_len, device=batch["tokens"].device))

    def prologue(self, pieces: Any, batch: Batch, context: Tensor) -> Tensor:  # noqa: D102
        return pieces.embedding(batch["tokens"]).transpose(0, 1)

    def layer(self, layer: nn.Module, x: Tensor, context: Tensor) -> Tensor:  # noqa: D102
        return layer(x, context)

    def epilogue(self, pieces: Any, x: Tensor, context: Tensor) -> Tensor:  # noqa: D102
        return pieces.lm_head(pieces.final_norm(x).transpose(0, 1))

    def attention(self) -> dict[str, pa.ContextParallel]:  # noqa: D102
        return {"attention.core": pa.ContextParallel(layout="BNSD", mask_kwarg_name="mask")}


def blueprint(model: nn.Module) -> pa.Blueprint:
    """Return the blueprint of a model that ``build`` made."""
    return OwnBlueprint()
