"""A loss that is lower under pipeline x FSDP than on one process: five causes in one script.

    python examples/seed/low_loss.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=6 examples/seed/low_loss.py --trace trace/parallel \
        --fault micro_means
    paralign compare trace/reference trace/parallel

Mesh (pp, dp) = (2, 3), 1F1B with 4 micro-batches, rows of uneven length. ``--fault NAME``:

- ``micro_means``: every micro-batch's mean loss counts alike, however many tokens it has;
- ``idle_ranks``: the loss shown is averaged over all ranks, also those of the first stage, which
  have none; training itself is right;
- ``ends_unreduced``: norm and head are in no FSDP unit, so that nobody averages their gradients;
- ``stage_seed``: every stage draws its weights from a seed of its own;
- ``no_mask``: the mask is given to the first stage and not handed on.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import paralign as pa

FAULTS = ("micro_means", "idle_ranks", "ends_unreduced", "stage_seed", "no_mask")
PP, DP = 2, 3
ROWS, SEQ_LEN, VOCAB, MICROBATCHES = 12, 32, 256, 4
HIDDEN, HEADS, LAYERS = 32, 4, 4
LEARNING_RATE = 1e-3
WHAT = ("loss", "params", "grads", "inputs", "outputs", "microbatch_grads")


def text_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text.unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, SEQ_LEN - 2 * row :] = -100  # ragged: rows end earlier and earlier
    return tokens, labels


class Attention(nn.Module):
    """Attention that sees what its mask allows, or everything."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wv = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend."""
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        output: Tensor = self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.attention = Attention()
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        x = x + self.attention(self.norm1(x), mask)
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class Stage(nn.Module):
    """Some layers of the model, under their names in the whole of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(LAYERS)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(HIDDEN)
        self.head: nn.Linear | None = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.mask: Tensor | None = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens or hidden states, give hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.mask)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def keep(self, index: int) -> None:
        """Keep what stage ``index`` holds."""
        per_stage = LAYERS // PP
        for number in range(LAYERS):
            if number // per_stage != index:
                del self.layers[str(number)]
        if index > 0:
            self.embedding = None
        if index < PP - 1:
            self.norm = self.head = None


def build_stage(mesh: DeviceMesh, fault: str | None) -> Stage:
    """Build this rank's stage, sharded over dp."""
    pp_rank = mesh.get_local_rank("pp")
    torch.manual_seed(pp_rank if fault == "stage_seed" else 0)
    stage = Stage().double()
    stage.keep(pp_rank)
    if fault == "no_mask" and pp_rank > 0:
        stage.mask = None
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    if fault != "ends_unreduced":
        fully_shard(stage, mesh=mesh["dp"])
    elif stage.embedding is not None:
        fully_shard(stage.embedding, mesh=mesh["dp"])
    return stage


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the token losses."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def run_reference(trace: str) -> None:
    """Train one step on this process alone."""
    torch.manual_seed(0)
    model = Stage().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rec = pa.record(trace, model, optimizer=optimizer, what=WHAT).start()
    tokens, labels = text_batch()
    num_tokens = int((labels != -100).sum())
    loss = token_loss_sum(model(tokens), labels) / num_tokens
    loss.backward()
    rec.loss(loss, tokens=num_tokens, reduction="mean", scope="global")
    optimizer.step()


def train(trace: str, *, reference: bool = False, fault: str | None = None) -> None:
    """Train one step: on one process, or on every rank of a world of 6."""
    if reference:
        run_reference(trace)
        return
    mesh = init_device_mesh("cpu", (PP, DP), mesh_dim_names=("pp", "dp"))
    pp_rank, dp_rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = build_stage(mesh, fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    facts = {"num_microbatches": MICROBATCHES}
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, what=WHAT, facts=facts).start()

    tokens, labels = text_batch()
    num_tokens = int((labels != -100).sum())
    tokens, labels = tokens.chunk(DP)[dp_rank], labels.chunk(DP)[dp_rank]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        # FSDP averages over dp, so what is to be a sum is multiplied by dp first.
        loss_sum, count = token_loss_sum(logits, targets), int((targets != -100).sum())
        rec.loss(loss_sum, tokens=count)  # a part; the loss shown is reported below
        if fault == "micro_means":
            return loss_sum / count / MICROBATCHES
        return loss_sum / num_tokens * DP

    schedule = Schedule1F1B(wrap(model, mesh), MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    losses: list[Tensor] = []
    if pp_rank == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses)
    shown = torch.stack([torch.zeros((), dtype=torch.float64), *losses]).sum().detach()
    dist.all_reduce(shown)
    shown /= dist.get_world_size() if fault == "idle_ranks" else DP
    rec.loss(shown, reduction="mean", scope="global")
    optimizer.step()


def wrap(model: Stage, mesh: DeviceMesh) -> PipelineStage:
    """Make a stage for torch's schedules, with the shapes that it takes and gives."""
    shape = (ROWS // DP // MICROBATCHES, SEQ_LEN)
    tokens = torch.zeros(shape, dtype=torch.int64)
    hidden, logits = (
        torch.zeros(*shape, width, dtype=torch.float64, requires_grad=True)
        for width in (HIDDEN, VOCAB)
    )
    index = mesh.get_local_rank("pp")
    return PipelineStage(
        model,
        index,
        PP,
        torch.device("cpu"),
        input_args=(tokens if index == 0 else hidden,),
        output_args=(hidden if index < PP - 1 else logits,),
        group=mesh.get_group("pp"),
    )


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", action="store_true", help="train on this process alone")
    parser.add_argument("--trace", required=True, help="folder to record into")
    parser.add_argument("--fault", choices=FAULTS, help="train with this fault")
    arguments = parser.parse_args()
    if not arguments.reference:
        dist.init_process_group("gloo")
    train(arguments.trace, reference=arguments.reference, fault=arguments.fault)
    if not arguments.reference:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
