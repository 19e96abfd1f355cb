"""FSDP2 over dp, tensor and sequence parallel over tp, both by torch; one key and value head.

    python examples/foreign/fsdp_tp.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=4 examples/foreign/fsdp_tp.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

All query heads share one key and value head (multi-query attention), so these two projections are
replicated over tp while the query heads are split. ``--fault``: ``to_local()`` of their outputs is
called without saying that the gradient coming back is a partial sum, so that each tp rank keeps
only what its own query heads contributed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB = 8, 32, 256
HIDDEN, HEADS, LAYERS, FFN = 32, 4, 2, 64
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 0.5


def text_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text[step * ROWS * SEQ_LEN :].unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, SEQ_LEN - 3 * row :] = -100  # ragged: some rows end early
    return tokens, labels


class Attention(nn.Module):
    """Causal multi-query attention."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, HIDDEN // HEADS, bias=False)
        self.wv = nn.Linear(HIDDEN, HIDDEN // HEADS, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over whole sequences; under tp with this rank's query heads."""
        q = self.wq(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
        k, v = (w(x).unsqueeze(1).expand_as(q) for w in (self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every token."""
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(HIDDEN)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
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
        return logits.clone()  # FSDP dislikes views, and under tp it is one


class Replicated(ParallelStyle):
    """A linear layer that every tp rank computes whole, and uses for its own heads only."""

    def __init__(self, *, fault: bool) -> None:
        super().__init__()
        # Each rank's heads see the output in their own way: its gradient is a partial sum.
        self.grad_placements = None if fault else (Partial(),)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(
            module,
            device_mesh,
            output_fn=lambda _, out, mesh: out.to_local(grad_placements=self.grad_placements),
        )


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, fault: bool) -> None:
    """Split the model over ``mesh``; between blocks the sequence is split (dim 1)."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": Replicated(fault=fault),
                "attention.wv": Replicated(fault=fault),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate()
                ),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world of 4."""
    torch.manual_seed(0)
    model = Transformer().double()
    mesh, dp_rank, dp_degree = None, 0, 1
    if not reference:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        dp_rank, dp_degree = mesh.get_local_rank("dp"), mesh["dp"].size()
        apply_tensor_parallel(model, mesh["tp"], fault=fault)
        for layer in [*model.layers, model]:
            fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, steps=STEPS).start()  # paralign
    for step in range(STEPS):
        tokens, labels = text_batch(step)
        num_tokens = int((labels != -100).sum())
        tokens, labels = (x.chunk(dp_degree)[dp_rank] for x in (tokens, labels))
        loss_sum = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        # FSDP averages over dp, so what is to be a sum is multiplied by dp first.
        (loss_sum / num_tokens * dp_degree).backward()
        rec.loss(loss_sum, tokens=int((labels != -100).sum()))  # paralign
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
