"""Experts over ep and attention over tp, each of which forgets to add up what its ranks computed.

    python examples/seed/moe_demo.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=4 examples/seed/moe_demo.py --trace trace/parallel \
        --fault experts
    paralign compare trace/reference trace/parallel

Mesh (ep, tp) = (2, 2); all ranks have the same tokens, in the layout ``[sequence, batch, hidden]``,
with the mask made inside ``forward``. An ep rank has every second half of the experts, a tp rank
half of the heads. ``--fault NAME``:

- ``experts``: the outputs of the experts are not summed over ep;
- ``attention``: the output of attention is not summed over tp.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import paralign as pa

FAULTS = ("experts", "attention")
EP, TP = 2, 2
ROWS, SEQ_LEN, VOCAB = 2, 32, 256
HIDDEN, HEADS, RANK, LAYERS = 32, 4, 16, 2
EXPERTS, TOP_K, FFN, SCALING = 8, 3, 16, 2.5
LEARNING_RATE = 1e-3
WHAT = ("loss", "params", "grads", "inputs", "outputs")


def text_batch() -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text.unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    return windows[:, :-1].clone(), windows[:, 1:].clone()


class SumForward(torch.autograd.Function):
    """Sum over the group in the forward; the backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return the sum, which every rank goes on with alike."""
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grads[0], None


class SumBackward(torch.autograd.Function):
    """Pass on in the forward; sum the gradient over the group in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return the input: every rank uses it in its own way."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of what the ranks contributed."""
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Part:
    """A group of ranks that computes parts of one sum, and this rank's place in it."""

    def __init__(self, group: Any = None, *, sums: bool = True) -> None:
        self.group, self.sums = group, sums
        self.rank = 0 if group is None else dist.get_rank(group)
        self.degree = 1 if group is None else dist.get_world_size(group)

    def enter(self, x: Tensor) -> Tensor:
        """Begin the part that every rank computes for itself."""
        if self.group is None:
            return x
        entered: Tensor = SumBackward.apply(x, self.group)  # type: ignore[no-untyped-call]
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """End it: add up the parts, unless that is forgotten."""
        if self.group is None or not self.sums:
            return x
        left: Tensor = SumForward.apply(x, self.group)  # type: ignore[no-untyped-call]
        return left


def heads_of(linear: nn.Linear, tp: Part, dim: int, parts: int = 1) -> nn.Linear:
    """Cut the weight of ``linear`` by heads; ``parts`` are fused. The bias is dropped."""
    pieces = [part.chunk(tp.degree, dim)[tp.rank] for part in linear.weight.chunk(parts, dim)]
    linear.weight = nn.Parameter(torch.cat(pieces, dim).detach().clone())
    linear.register_parameter("bias", None)
    return linear


class Attention(nn.Module):
    """Latent attention: low-rank projections, heads split over tp."""

    def __init__(self, tp: Part) -> None:
        super().__init__()
        self.tp = tp
        self.q_down = nn.Linear(HIDDEN, RANK)
        self.q_up = heads_of(nn.Linear(RANK, HIDDEN), tp, 0)
        self.kv_down = nn.Linear(HIDDEN, RANK)
        self.kv_up = heads_of(nn.Linear(RANK, 2 * HIDDEN), tp, 0, parts=2)
        self.out_proj = heads_of(nn.Linear(HIDDEN, HIDDEN), tp, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend; ``x`` is ``[S, B, HIDDEN]``."""
        q = self.q_up(self.tp.enter(self.q_down(x)))
        k, v = self.kv_up(self.tp.enter(self.kv_down(x))).chunk(2, dim=-1)
        q, k, v = (
            part.unflatten(-1, (-1, HIDDEN // HEADS)).permute(1, 2, 0, 3) for part in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(HIDDEN // HEADS)
        mixed = scores.masked_fill(mask == 0, -1e9).softmax(-1) @ v
        return self.tp.leave(self.out_proj(mixed.permute(2, 0, 1, 3).flatten(2)))


class Expert(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FFN)
        self.up_proj = nn.Linear(HIDDEN, FFN)
        self.down_proj = nn.Linear(FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every token."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Experts(nn.Module):
    """Top-k of sigmoid scores; every ep rank has its experts and all tokens."""

    def __init__(self, ep: Part) -> None:
        super().__init__()
        self.ep = ep
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        everyone = [Expert() for _ in range(EXPERTS)]
        mine = range(EXPERTS)[ep.rank * EXPERTS // ep.degree :][: EXPERTS // ep.degree]
        self.experts = nn.ModuleDict({str(index): everyone[index] for index in mine})
        self.shared_expert = Expert()

    def forward(self, x: Tensor) -> Tensor:
        """Add up what the chosen experts say, and the shared one."""
        scores, chosen = torch.topk(self.gate(x).sigmoid(), TOP_K, dim=-1)
        weights = self.ep.enter(scores.softmax(-1) * SCALING)
        given = self.ep.enter(x)
        output = torch.zeros_like(x)
        for index, expert in self.experts.items():
            weight = (weights * (chosen == int(index))).sum(-1, keepdim=True)
            output = output + expert(given) * weight
        shared: Tensor = self.shared_expert(x)
        return self.ep.leave(output) + shared


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self, ep: Part, tp: Part) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(HIDDEN)
        self.attention = Attention(tp)
        self.norm2 = nn.RMSNorm(HIDDEN)
        self.moe = Experts(ep)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Attend, then ask the experts, both with a residual."""
        x = x + self.attention(self.norm1(x), mask)
        output: Tensor = x + self.moe(self.norm2(x))
        return output


class Transformer(nn.Module):
    """A decoder that makes its mask by itself."""

    def __init__(self, ep: Part, tp: Part) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block(ep, tp) for _ in range(LAYERS))
        self.final_norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[B, S, VOCAB]``."""
        x = self.embedding(tokens).transpose(0, 1)
        mask = torch.ones(SEQ_LEN, SEQ_LEN).tril()
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.lm_head(self.final_norm(x).transpose(0, 1))
        return logits


def train(trace: str, *, reference: bool = False, fault: str | None = None) -> None:
    """Train one step: on one process, or on every rank of a world of 4."""
    torch.manual_seed(0)
    mesh, ep, tp = None, Part(), Part()
    if not reference:
        mesh = init_device_mesh("cpu", (EP, TP), mesh_dim_names=("ep", "tp"))
        ep = Part(mesh.get_group("ep"), sums=fault != "experts")
        tp = Part(mesh.get_group("tp"), sums=fault != "attention")
    model = Transformer(ep, tp).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, what=WHAT).start()
    tokens, labels = text_batch()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    rec.loss(loss, tokens=labels.numel(), reduction="mean", scope="global")
    optimizer.step()


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
