"""Pipeline parallel by torch, with stages that each number their layers from 0.

    python examples/foreign/pipeline.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=2 examples/foreign/pipeline.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

The loss is divided by the number of valid tokens of the whole batch, so the schedule must not
divide by the number of micro-batches once more. ``--fault``: ``scale_grads=False`` is forgotten.
The loss that is shown stays right, and with AdamW and clipping training hardly looks different.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB, MICROBATCHES = 8, 32, 256, 4
HIDDEN, HEADS, LAYERS = 32, 4, 4
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
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
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


class Stage(nn.Module):
    """A run of layers; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(HIDDEN)
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens or hidden states, give hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def build_stage(index: int, num_stages: int) -> Stage:
    """Cut one stage out of the whole model, whose weights every rank draws alike."""
    whole = Stage().double()
    per_stage = LAYERS // num_stages
    first, last = index == 0, index == num_stages - 1
    layers = list(whole.layers)[index * per_stage : (index + 1) * per_stage]
    whole.layers = nn.ModuleList(layers)  # numbered from 0 on every stage
    whole.embedding = whole.embedding if first else None
    whole.norm, whole.head = (whole.norm, whole.head) if last else (None, None)
    return whole


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the token losses."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world."""
    torch.manual_seed(0)
    pp_rank, pp_degree = (0, 1) if reference else (dist.get_rank(), dist.get_world_size())
    model = build_stage(pp_rank, pp_degree)
    stage = None if reference else wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mesh = None if reference else {"pp": dist.group.WORLD}  # paralign
    facts = {"num_microbatches": 1 if reference else MICROBATCHES}  # paralign
    rec = pa.record(trace, model, mesh=mesh, facts=facts, steps=STEPS).start()  # paralign
    for step in range(STEPS):
        tokens, labels = text_batch(step)
        num_tokens = int((labels != -100).sum())
        if stage is None:
            loss_sum = token_loss_sum(model(tokens), labels)
            (loss_sum / num_tokens).backward()
            losses = [loss_sum.detach() / num_tokens]
        else:
            losses = run_pipeline(stage, tokens, labels, num_tokens, fault=fault)
        if pp_rank == pp_degree - 1:
            rec.loss(sum(losses), scope="global")  # paralign
        clip(model, reference=reference)
        optimizer.step()
        optimizer.zero_grad()


def wrap(model: Stage) -> PipelineStage:
    """Make a stage for torch's schedules, with the shapes that it takes and gives."""
    tokens = torch.zeros(ROWS // MICROBATCHES, SEQ_LEN, dtype=torch.int64)
    hidden = torch.zeros(*tokens.shape, HIDDEN, dtype=torch.float64, requires_grad=True)
    logits = torch.zeros(*tokens.shape, VOCAB, dtype=torch.float64, requires_grad=True)
    index, num_stages = dist.get_rank(), dist.get_world_size()
    return PipelineStage(
        model,
        index,
        num_stages,
        torch.device("cpu"),
        input_args=(tokens if index == 0 else hidden,),
        output_args=(logits if index == num_stages - 1 else hidden,),
    )


def run_pipeline(
    stage: PipelineStage, tokens: Tensor, labels: Tensor, num_tokens: int, *, fault: bool
) -> list[Tensor]:
    """Run forward and backward of all micro-batches; the last stage gets their losses."""
    schedule = Schedule1F1B(
        stage,
        MICROBATCHES,
        loss_fn=lambda logits, targets: token_loss_sum(logits, targets) / num_tokens,
        scale_grads=fault,
    )
    losses: list[Tensor] = []
    if dist.get_rank() == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses)
    return losses


def clip(model: Stage, *, reference: bool) -> None:
    """Clip the gradients by their norm over all stages."""
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    if not reference:
        norm = norm**2
        dist.all_reduce(norm)
        norm = norm**0.5
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)


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
