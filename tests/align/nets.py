"""A model with nested parts, and its training loop with micro-batches, for tests of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paralign.align import record
from tests.align.toys import batches

ALL = ("loss", "params", "grads", "inputs", "outputs", "output_grads")


class Block(nn.Module):
    """A part with parts, that returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        return x + self.down(h), h.mean(-1, keepdim=True)


class Net(nn.Module):
    """Two blocks; ``repeat`` says how activation checkpointing repeats them."""

    def __init__(self, repeat: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.repeat = repeat

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.repeat:
                x, more = checkpoint(block, x, use_reentrant=self.repeat == "reentrant")
            else:
                x, more = block(x)
            x = x * (1 + more)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build(repeat: str = "") -> Net:
    torch.manual_seed(3)
    return Net(repeat).double()


def train(
    folder: Path | None,
    model: nn.Module,
    call: Callable[[Tensor], Tensor] | None = None,
    *,
    micro_batches: int = 2,
    change: Callable[[nn.Module], None] | None = None,
    data: Sequence[tuple[Tensor, Tensor]] | None = None,
    told: bool = False,
    **options: Any,
) -> nn.Module:
    """Train one step, summing gradients over micro-batches.

    Args:
        folder: Where to record; None: nothing is recorded.
        model: What is trained.
        call: Tokens -> logits; None: the model.
        micro_batches: Number of them.
        change: Called when the gradients are there, to break them.
        data: Tokens and labels of every step; None: one step of the usual ones.
        told: The loop tells the inputs, labels as well.
        options: Of ``record``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    forward = call or model
    recorder = None
    if folder is not None:
        options = {"what": ALL, **options}
        recorder = record(folder, model, optimizer=optimizer, **options).start()
    for tokens, labels in batches(1) if data is None else data:
        if told and recorder is not None:
            recorder.inputs(tokens, labels=labels)
        for rows in range(0, 8, 8 // micro_batches):
            part = slice(rows, rows + 8 // micro_batches)
            logits = forward(tokens[part]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, labels[part].flatten(), reduction="sum")
            (loss / labels.numel()).backward()
            if recorder is not None:
                recorder.loss(loss, tokens=labels[part].numel())
        if change is not None:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    return model
