"""FSDP2 under a trainer that owns the loop; its optimizer clips inside ``step()``.

    python examples/foreign/trainer.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=2 examples/foreign/trainer.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

Nothing between backward and the parameters' update can be reached from outside. ``--fault``: the
optimizer takes the norm of the shards that its rank holds for the norm of all gradients, so that
every rank clips by another factor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB = 8, 32, 256
HIDDEN, HEADS, LAYERS = 32, 4, 2
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 0.5


def text_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text[step * ROWS * SEQ_LEN :].unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, SEQ_LEN - 3 * row :] = -100  # ragged: rows end earlier and earlier
    return tokens, labels


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class Transformer(nn.Module):
    """A decoder without position embeddings, which is enough here."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, S, VOCAB]``."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class ClippingOptimizer:
    """AdamW that clips the gradients by their global norm before it steps."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, local_norm: bool) -> None:
        self.parameters = list(parameters)
        self.inner = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE)
        self.local_norm = local_norm

    def step(self) -> None:
        """Clip, step and clear the gradients."""
        torch.nn.utils.clip_grads_with_norm_(self.parameters, CLIP, self.norm())
        self.inner.step()
        self.inner.zero_grad()

    def norm(self) -> Tensor:
        """Return the norm of all gradients, of which this rank may hold shards only."""
        squares = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters:
            grad = parameter.grad
            if grad is not None:
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                squares += local.square().sum()
        if isinstance(self.parameters[0], DTensor) and not self.local_norm:
            dist.all_reduce(squares)
        return squares.sqrt()


class Trainer:
    """Owns the loop; outsiders are told about losses and nothing else."""

    def __init__(self, model: nn.Module, dp_rank: int, dp_degree: int, *, local_norm: bool) -> None:
        self.model = model
        self.dp_rank, self.dp_degree = dp_rank, dp_degree
        self.optimizer = ClippingOptimizer(model.parameters(), local_norm=local_norm)
        self.on_loss: Callable[..., None] | None = None

    def fit(self) -> None:
        """Train for a few steps."""
        for step in range(STEPS):
            tokens, labels = text_batch(step)
            num_tokens = int((labels != -100).sum())
            tokens, labels = (x.chunk(self.dp_degree)[self.dp_rank] for x in (tokens, labels))
            logits = self.model(tokens).flatten(0, 1)
            loss_sum = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            # FSDP averages over dp, so what is to be a sum is multiplied by dp first.
            (loss_sum / num_tokens * self.dp_degree).backward()
            if self.on_loss is not None:
                self.on_loss(loss_sum, tokens=int((labels != -100).sum()))
            self.optimizer.step()


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world."""
    torch.manual_seed(0)
    model = Transformer().double()
    mesh, dp_rank, dp_degree = None, 0, 1
    if not reference:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        dp_rank, dp_degree = mesh.get_local_rank(), mesh.size()
        for module in [*model.layers, model]:
            fully_shard(module, mesh=mesh)
    trainer = Trainer(model, dp_rank, dp_degree, local_norm=fault)
    optimizer = trainer.optimizer  # paralign
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, steps=STEPS).start()  # paralign
    trainer.on_loss = rec.loss  # paralign
    trainer.fit()


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
