"""Parallel code of your own under paralign's judgement: plain FSDP2 with gradient accumulation.

Nothing here uses paralign. ``build`` is called on every rank with the whole model, which starts
with the same weights as the reference, and returns the step to judge.

    paralign align examples/own_program.yaml
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def build(model: Any, mesh: DeviceMesh, config: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """Shard the model over dp_shard and return its training step."""
    shards = mesh["dp_shard"]
    for layer in model.layers:
        fully_shard(layer, mesh=shards)
    fully_shard(model, mesh=shards)
    num_microbatches = config.pipeline.num_microbatches

    def step(batch: dict[str, Tensor]) -> Tensor:
        """Add the gradients of this rank's rows and return the loss of the whole batch."""
        num_tokens = (batch["labels"] != -100).sum()  # of the whole batch, known on every rank
        rows = {name: t.chunk(shards.size())[shards.get_local_rank()] for name, t in batch.items()}
        total = torch.zeros((), dtype=torch.float64)
        for number in range(num_microbatches):
            piece = {name: t.chunk(num_microbatches)[number] for name, t in rows.items()}
            model.set_requires_gradient_sync(number == num_microbatches - 1)
            loss = token_loss_sum(model, piece) / num_tokens
            # FSDP averages over its ranks; the sum over them is what the loss needs.
            (loss * shards.size()).backward()
            total += loss.detach()
        dist.all_reduce(total, group=shards.get_group())
        return total

    return step


def token_loss_sum(model: nn.Module, piece: dict[str, Tensor]) -> Tensor:
    """Sum the loss of the tokens that have a label; labels are shifted already."""
    logits = model(piece["tokens"])
    return F.cross_entropy(
        logits.flatten(0, 1), piece["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
