"""A small model and its training loop, plain torch, for recording tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align.trace_reader import TraceReader
from paralign.layout import boxes

EVERYTHING = ("loss", "norm", "params", "grads", "optimizer")


class Toy(nn.Module):
    """Embedding and head tied, a frozen bias, a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.layers[0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(dtype: torch.dtype = torch.float64) -> Toy:
    torch.manual_seed(0)
    return Toy().to(dtype)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randint(0, 11, (8, 6), generator=generator),
            torch.randint(0, 11, (8, 6), generator=generator),
        )


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, total: int) -> Tensor:
    logits = model(tokens)
    return (
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / total
    )


def train(
    model: nn.Module,
    steps: int,
    *,
    recorder: Any = None,
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_,
    max_norm: float = 0.01,
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, labels in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, tokens, labels, labels.numel())
        loss.backward()
        if recorder is not None:
            recorder.loss(loss, tokens=labels.numel(), reduction="mean", scope="global")
        clip(model.parameters(), max_norm)
        optimizer.step()
    return optimizer


def tensors(folder: Path) -> dict[tuple[str, int, str], Tensor]:
    """Return ``(kind, step, name) -> tensor`` of a trace of one rank, without None gradients."""
    found = {}
    with TraceReader(folder) as reader:
        (index,) = reader.ranks
        for entry in index.tensors:
            if entry.file is not None:
                (box,) = boxes(entry.map)
                name = f"{entry.name}.{entry.state}" if entry.state else entry.name
                found[entry.kind, entry.step, name] = reader.read(entry, box).clone()
    return found
