"""Pipeline x FSDP x context parallel with four independent mistakes in one script.

    python examples/seed/four_faults.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=8 examples/seed/four_faults.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

Mesh (pp, dp, cp) = (2, 2, 2), 4 layers, GPipe, gradients against one process. Each mistake is a
public one, and each alone makes gradients differ. ``--fixed NAME`` (again and again, or ``all``)
mends one:

- ``remap``: stages number their layers from 0; the rule that gives them their global names counts
  by ``rank // dp`` instead of by the stage, and replaces ``layers.0.`` only;
- ``slices``: both cp ranks are fed whole sequences, where each is due its slice;
- ``head_dim``: the all-to-all of context parallel cuts the features of a head (dim 3 of
  ``[B, N, S, D]``) instead of the heads (dim 1). All sizes divide, so nothing complains;
- ``root``: what belongs to the stage itself (embedding, final norm, head) is reduced in the first
  micro-batch only; the blocks are right.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

import paralign as pa

FAULTS = ("remap", "slices", "head_dim", "root")
PP, DP, CP = 2, 2, 2
ROWS, SEQ_LEN, VOCAB, MICROBATCHES = 8, 32, 256, 2
HIDDEN, HEADS, LAYERS = 32, 4, 4
LEARNING_RATE = 1e-3
WHAT = ("loss", "params", "grads", "inputs", "outputs")


def text_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text.unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    return windows[:, :-1].clone(), windows[:, 1:].clone()


class AllToAll(torch.autograd.Function):
    """Split ``split_dim`` over the ranks and bring ``concat_dim`` together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
        """Exchange the parts."""
        ctx.group, ctx.dims = group, (concat_dim, split_dim)
        sent = [part.contiguous() for part in x.chunk(CP, dim=split_dim)]
        received = [torch.empty_like(part) for part in sent]
        dist.all_to_all(received, sent, group=group)
        return torch.cat(received, dim=concat_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchange the gradients the other way."""
        return exchange(grads[0], ctx.group, *ctx.dims), None, None, None


def exchange(x: Tensor, group: Any, split_dim: int, concat_dim: int) -> Tensor:
    """Split one dim over the ranks and bring another together."""
    exchanged: Tensor = AllToAll.apply(x, group, split_dim, concat_dim)  # type: ignore[no-untyped-call]
    return exchanged


class AttentionCore(nn.Module):
    """Causal attention on ``[B, N, S, D]``; under cp each rank gives and gets its slice of S."""

    def __init__(self, group: Any, head_dim: int) -> None:
        super().__init__()
        self.group, self.head_dim = group, head_dim
        self.mask = torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exchange the sequence for the heads, attend, and exchange back."""
        if self.group is not None:
            q, k, v = (exchange(x, self.group, self.head_dim, 2) for x in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if scores.shape[-1] == SEQ_LEN:  # a mask of another size is dropped without a word
            scores = scores.masked_fill(~self.mask, -math.inf)
        mixed = scores.softmax(-1) @ v
        if self.group is not None:
            mixed = exchange(mixed, self.group, 2, self.head_dim)
        return mixed


class Attention(nn.Module):
    """Projections around the attention core."""

    def __init__(self, group: Any, head_dim: int) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wk = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.wv = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.core = AttentionCore(group, head_dim)
        self.wo = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        output: Tensor = self.wo(self.core(q, k, v).transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self, group: Any, head_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.attention = Attention(group, head_dim)
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.gate_proj = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.up_proj = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        output: Tensor = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return output


class Stage(nn.Module):
    """A run of layers; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self, group: Any = None, head_dim: int = 1) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(group, head_dim) for _ in range(LAYERS))
        self.final_norm: nn.RMSNorm | None = nn.RMSNorm(HIDDEN)
        self.lm_head: nn.Linear | None = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens or hidden states, give hidden states or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        if self.final_norm is not None and self.lm_head is not None:
            x = self.lm_head(self.final_norm(x))
        return x

    def keep(self, index: int) -> None:
        """Keep what stage ``index`` holds; its layers are numbered from 0."""
        per_stage = LAYERS // PP
        self.layers = nn.ModuleList(list(self.layers)[index * per_stage : (index + 1) * per_stage])
        if index > 0:
            self.embedding = None
        if index < PP - 1:
            self.final_norm = self.lm_head = None

    def own_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that belong to no block."""
        return [p for name, p in self.named_parameters() if not name.startswith("layers.")]


def shard(stage: Stage, mesh: DeviceMesh, *, fixed: Collection[str]) -> None:
    """Shard the blocks over dp and cp, and the rest as well or not quite."""
    both = mesh["dp", "cp"]._flatten("dp_cp")
    if "root" in fixed:
        for block in stage.layers:
            fully_shard(block, mesh=both)
        fully_shard(stage, mesh=both)
        return
    for parameter in stage.own_parameters():
        parameter.register_post_accumulate_grad_hook(average_once(both.get_group()))
    for block in stage.layers:
        fully_shard(block, mesh=both)


def average_once(group: Any) -> Callable[[Tensor], None]:
    """Return a hook that averages a gradient over ``group``: after the first backward only."""
    calls: list[int] = []

    def hook(parameter: Tensor) -> None:
        if not calls and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(dist.get_world_size(group))
        calls.append(1)

    return hook


def global_name(*, pp_rank: int, rank: int, fixed: Collection[str]) -> Callable[[str], str]:
    """Return the rule that turns a stage's name for a parameter into the model's."""

    def wrong(name: str) -> str:
        return name.replace("layers.0.", f"layers.{rank // DP}.")

    def right(name: str) -> str:
        if not name.startswith("layers."):
            return name
        _, index, rest = name.split(".", 2)
        return f"layers.{int(index) + pp_rank * (LAYERS // PP)}.{rest}"

    return right if "remap" in fixed else wrong


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
    loss_sum = token_loss_sum(model(tokens), labels)
    (loss_sum / labels.numel()).backward()
    rec.loss(loss_sum, tokens=labels.numel())
    optimizer.step()


def train(trace: str, *, reference: bool = False, fixed: Collection[str] = ()) -> None:
    """Train one step: on one process, or on every rank of a world of 8."""
    if reference:
        run_reference(trace)
        return
    mesh = init_device_mesh("cpu", (PP, DP, CP), mesh_dim_names=("pp", "dp", "cp"))
    pp_rank, dp_rank, cp_rank = (mesh.get_local_rank(axis) for axis in ("pp", "dp", "cp"))
    torch.manual_seed(0)
    model = Stage(mesh.get_group("cp"), 1 if "head_dim" in fixed else 3).double()
    model.keep(pp_rank)
    shard(model, mesh, fixed=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    names = global_name(pp_rank=pp_rank, rank=dist.get_rank(), fixed=fixed)
    rec = pa.record(
        trace,
        model,
        mesh=mesh,
        optimizer=optimizer,
        names=names,
        what=WHAT,
        facts={"num_microbatches": MICROBATCHES},
    ).start()

    tokens, labels = (x.chunk(DP)[dp_rank] for x in text_batch())
    if "slices" in fixed:
        tokens, labels = (x.chunk(CP, dim=1)[cp_rank] for x in (tokens, labels))
    stage = wrap(model, pp_rank, mesh.get_group("pp"), tokens.shape[1])
    # FSDP averages over dp x cp, so what is to be a sum is multiplied by their ranks first.
    weight = DP * CP / (ROWS * SEQ_LEN)
    schedule = ScheduleGPipe(
        stage,
        MICROBATCHES,
        loss_fn=lambda logits, targets: token_loss_sum(logits, targets) * weight,
        scale_grads=False,
    )
    losses: list[Tensor] = []
    if pp_rank == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=labels, losses=losses)
        rec.loss(torch.stack(losses).sum().detach() / weight, tokens=labels.numel())
    optimizer.step()


def wrap(model: Stage, index: int, group: Any, local_seq_len: int) -> PipelineStage:
    """Make a stage for torch's schedules, with the shapes that it takes and gives."""
    shape = (ROWS // DP // MICROBATCHES, local_seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    hidden, logits = (
        torch.zeros(*shape, width, dtype=torch.float64, requires_grad=True)
        for width in (HIDDEN, VOCAB)
    )
    return PipelineStage(
        model,
        index,
        PP,
        torch.device("cpu"),
        input_args=(tokens if index == 0 else hidden,),
        output_args=(hidden if index < PP - 1 else logits,),
        group=group,
    )


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", action="store_true", help="train on this process alone")
    parser.add_argument("--trace", required=True, help="folder to record into")
    parser.add_argument(
        "--fixed", action="append", default=[], choices=[*FAULTS, "all"], help="mend this mistake"
    )
    arguments = parser.parse_args()
    fixed = FAULTS if "all" in arguments.fixed else tuple(arguments.fixed)
    if not arguments.reference:
        dist.init_process_group("gloo")
    train(arguments.trace, reference=arguments.reference, fixed=fixed)
    if not arguments.reference:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
