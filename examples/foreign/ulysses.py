"""Ulysses attention written by hand: sequence slices to heads and back by all-to-all over cp.

    python examples/foreign/ulysses.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=2 examples/foreign/ulysses.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

Every rank holds all parameters and a slice of every sequence; gradients are summed over cp before
the optimizer steps. ``--fault``: labels are shifted after the sequence was cut instead of before,
so that the last token of every slice but the last loses its target.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB = 4, 64, 256
HIDDEN, HEADS, LAYERS = 32, 4, 2
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 0.5


def text_tokens(step: int) -> Tensor:
    """Return tokens ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    return text[step * ROWS * SEQ_LEN :][: ROWS * SEQ_LEN].view(ROWS, SEQ_LEN)


def shift(tokens: Tensor) -> Tensor:
    """Return for every token the one after it; the last has none (-100)."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


class AllToAll(torch.autograd.Function):
    """Split ``split_dim`` over the ranks and bring ``concat_dim`` together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
        """Exchange the parts."""
        ctx.group, ctx.dims = group, (concat_dim, split_dim)
        degree = dist.get_world_size(group)
        sent = [part.contiguous() for part in x.chunk(degree, dim=split_dim)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group=group)
        return torch.cat(received, dim=concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchange the gradients the other way."""
        return exchange(grads[0], ctx.group, *ctx.dims), None, None, None


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn pairs of features of ``x`` ``[B, N, S, D]`` by angles that grow with the position."""
    half = x.shape[-1] // 2
    speed = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions[:, None, :, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


def exchange(x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
    """Split one dim over the ranks and bring another together."""
    exchanged: Tensor = AllToAll.apply(x, group, split_dim, concat_dim)  # type: ignore[no-untyped-call]
    return exchanged


class Attention(nn.Module):
    """Causal attention over the whole sequence, of which this rank holds a slice."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wv = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Exchange the sequence for the heads, attend, and exchange back."""
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, positions), rotate(k, positions)
        if self.group is not None:
            q, k, v = (exchange(part, self.group, 1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.group is not None:
            mixed = exchange(mixed, self.group, 2, 1)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.attention = Attention(group)
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        x = x + self.attention(self.norm1(x), positions)
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class Transformer(nn.Module):
    """A decoder with rotary positions."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(group) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits ``[B, S, VOCAB]`` of this rank's slice."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        logits: Tensor = self.head(self.norm(x))
        return logits


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world."""
    torch.manual_seed(0)
    group: Any = None if reference else dist.group.WORLD
    cp_rank, cp_degree = (0, 1) if reference else (dist.get_rank(), dist.get_world_size())
    model = Transformer(group).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mesh, what = group and {"cp": group}, ("loss", "norm", "params", "grads", "inputs")  # paralign
    rec = pa.record(trace, model, mesh=mesh, what=what, steps=STEPS).start()  # paralign
    for step in range(STEPS):
        tokens = text_tokens(step)
        labels = shift(tokens)
        positions = torch.arange(SEQ_LEN).expand(ROWS, -1)
        tokens, labels, positions = (
            x.chunk(cp_degree, dim=1)[cp_rank] for x in (tokens, labels, positions)
        )
        if fault:
            labels = shift(tokens)
        num_tokens = (labels != -100).sum()
        if group is not None:
            dist.all_reduce(num_tokens, group=group)
        rec.inputs(tokens, labels=labels, positions=positions)  # paralign
        logits = model(tokens, positions)
        loss_sum = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (loss_sum / num_tokens).backward()
        rec.loss(loss_sum, tokens=int((labels != -100).sum()))  # paralign
        if group is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", action="store_true", help="train on this process alone")
    parser.add_argument("--trace", required=True, help="folder to record into")
    parser.add_argument("--fault", action="store_true", help="train with the fault")
    arguments = parser.parse_args()
    if not arguments.reference:
        dist.init_process_group("gloo")
    train(arguments.trace, reference=arguments.reference, fault=arguments.fault)
    if not arguments.reference:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
