"""DistributedDataParallel with gradient accumulation and ragged rows.

    python examples/foreign/ddp_accumulation.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=2 examples/foreign/ddp_accumulation.py \
        --trace trace/parallel
    paralign compare trace/reference trace/parallel

Gradients are reduced in the backward of the last micro-batch only. ``--fault``: the condition is
off by one and lets the first micro-batch reduce instead, so that what the later ones add stays on
its own rank. Nothing fails and the loss of the first step is right; the replicas drift apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB, MICROBATCHES = 12, 32, 256, 3
HIDDEN, HEADS, LAYERS = 32, 4, 2
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 0.5


def text_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text[step * ROWS * SEQ_LEN :].unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, SEQ_LEN - 2 * row :] = -100  # ragged: rows end earlier and earlier
    return tokens, labels


class Block(nn.Module):
    """One layer of the transformer, normalised before each half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class Transformer(nn.Module):
    """A decoder with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.position = nn.Parameter(torch.randn(SEQ_LEN, HIDDEN) * 0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, S, VOCAB]``."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world."""
    torch.manual_seed(0)
    model: nn.Module = Transformer().double()
    group, dp_rank, dp_degree = None, 0, 1
    if not reference:
        model = DistributedDataParallel(model)
        group, dp_rank, dp_degree = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mesh = None if reference else {"dp": group}  # paralign
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, steps=STEPS).start()  # paralign
    for step in range(STEPS):
        tokens, labels = text_batch(step)
        num_tokens = int((labels != -100).sum())
        mine = slice(dp_rank, None, dp_degree)  # every dp-th row
        microbatches = zip(
            tokens[mine].chunk(MICROBATCHES), labels[mine].chunk(MICROBATCHES), strict=True
        )
        for index, (inputs, targets) in enumerate(microbatches):
            reduces = index == 0 if fault else index == MICROBATCHES - 1
            with contextlib.ExitStack() as stack:
                if isinstance(model, DistributedDataParallel) and not reduces:
                    stack.enter_context(model.no_sync())
                logits = model(inputs)
                loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                # DDP averages over dp, so what is to be a sum is multiplied by dp first.
                (loss_sum / num_tokens * dp_degree).backward()
            rec.loss(loss_sum, tokens=int((targets != -100).sum()))  # paralign
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
