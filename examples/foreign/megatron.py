"""Tensor and sequence parallel in Megatron's style, by hand and with plain tensors.

    python examples/foreign/megatron.py --reference --trace trace/reference
    torchrun --standalone --nproc-per-node=2 examples/foreign/megatron.py --trace trace/parallel
    paralign compare trace/reference trace/parallel

Activations are ``[sequence, batch, hidden]``; between the parallel layers every rank holds a slice
of the sequence. Query, key and value are one weight, interleaved by groups of heads; gate and up
are another, [gate; up] on every rank. What a plain weight is a shard of is told by the attributes
that Megatron sets. ``--fault``: the norms are not marked as sequence parallel, so that nobody sums
their gradients, of which every rank has only what its slice of the sequence contributed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import paralign as pa  # paralign

ROWS, SEQ_LEN, VOCAB = 4, 32, 256
HIDDEN, HEADS, GROUPS, LAYERS, FFN = 32, 4, 2, 2, 48
HEAD_DIM, PER_GROUP = HIDDEN // HEADS, HEADS // GROUPS
STEPS, LEARNING_RATE, CLIP = 2, 1e-3, 0.5


def text_batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and shifted labels ``[ROWS, SEQ_LEN]`` of a standard library source file."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text[step * ROWS * SEQ_LEN :].unfold(0, SEQ_LEN + 1, SEQ_LEN)[:ROWS]
    tokens, labels = windows[:, :-1].clone(), windows[:, 1:].clone()
    for row in range(ROWS):
        labels[row, SEQ_LEN - 5 * row :] = -100  # ragged: rows end earlier and earlier
    return tokens, labels


class Tensors:
    """The tensor parallel group, or a world of one; what it sends splits or joins dim 0."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.degree = 1 if group is None else dist.get_world_size(group)

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Return the sum (or another ``op``) over the ranks."""
        total = x.clone()
        if self.degree > 1:
            dist.all_reduce(total, op=op, group=self.group)
        return total

    def gather(self, x: Tensor) -> Tensor:
        """Return what all ranks hold, joined."""
        if self.degree == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.degree)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum over the ranks."""
        if self.degree == 1:
            return x
        parts = [part.contiguous() for part in x.chunk(self.degree)]
        part = torch.empty_like(parts[0])
        dist.reduce_scatter(part, parts, group=self.group)
        return part


class GatherSequence(torch.autograd.Function):
    """All-gather in the forward, reduce-scatter in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Tensors) -> Tensor:
        """Join the slices of the sequence."""
        ctx.tp = tp
        return tp.gather(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients and split them."""
        return ctx.tp.reduce_scatter(grads[0]), None


class ScatterSequence(torch.autograd.Function):
    """Reduce-scatter in the forward, all-gather in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Tensors) -> Tensor:
        """Sum over the ranks and split the sequence."""
        ctx.tp = tp
        return tp.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Join the gradients."""
        return ctx.tp.gather(grads[0]), None


class VocabParallelLoss(torch.autograd.Function):
    """Sum of the token losses of logits whose vocabulary is split over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Tensors) -> Tensor:
        """Return the sum; labels of -100 count nothing."""
        local_vocab = logits.shape[-1]
        exponential = (logits - tp.all_reduce(logits.amax(-1), dist.ReduceOp.MAX)[..., None]).exp()
        probability = exponential / tp.all_reduce(exponential.sum(-1))[..., None]
        mine = labels - tp.rank * local_vocab
        here = (mine >= 0) & (mine < local_vocab)
        target = F.one_hot(mine.where(here, 0), local_vocab) * here[..., None]
        ctx.save_for_backward((probability - target) * (labels != -100)[..., None])
        picked = tp.all_reduce((probability * target).sum(-1))
        return -picked[labels != -100].log().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return probability minus target."""
        return ctx.saved_tensors[0] * grads[0], None, None


def shard(whole: Tensor, tp: Tensors, dim: int, stride: int = 1) -> nn.Parameter:
    """Cut this rank's part of a weight, marked as Megatron does; ``stride`` parts are fused."""
    parts = [part.chunk(tp.degree, dim)[tp.rank] for part in whole.chunk(stride, dim)]
    parameter = nn.Parameter(torch.cat(parts, dim).clone())
    marked: Any = parameter
    marked.tensor_model_parallel = True
    marked.partition_dim, marked.partition_stride = dim, stride
    return parameter


def normal(*shape: int) -> Tensor:
    """Draw a weight; every rank draws the whole one alike."""
    return torch.randn(*shape, dtype=torch.float64) * 0.1


class ColumnParallelLinear(nn.Module):
    """Output features are split; the input is joined along the sequence first."""

    def __init__(self, tp: Tensors, in_features: int, out_features: int, stride: int = 1) -> None:
        super().__init__()
        self.tp = tp
        self.weight = shard(normal(out_features, in_features), tp, 0, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's features of the whole sequence."""
        gathered: Tensor = GatherSequence.apply(x, self.tp)  # type: ignore[no-untyped-call]
        return F.linear(gathered, self.weight)


class RowParallelLinear(nn.Module):
    """Input features are split; the output is summed, and split along the sequence."""

    def __init__(self, tp: Tensors, in_features: int, out_features: int) -> None:
        super().__init__()
        self.tp = tp
        self.weight = shard(normal(out_features, in_features), tp, 1)
        self.bias = nn.Parameter(normal(out_features))
        marked: Any = self.bias
        marked.sequence_parallel = True

    def forward(self, x: Tensor) -> Tensor:
        """Return all features of this rank's slice; the bias is added once."""
        y: Tensor = ScatterSequence.apply(F.linear(x, self.weight), self.tp)  # type: ignore[no-untyped-call]
        return y + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of the table are split; a rank looks up those it has, the sum is split again."""

    def __init__(self, tp: Tensors) -> None:
        super().__init__()
        self.tp = tp
        self.weight = shard(normal(VOCAB, HIDDEN), tp, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[S/tp, B, HIDDEN]`` of tokens ``[S, B]``."""
        rows = self.weight.shape[0]
        mine = tokens - self.tp.rank * rows
        here = (mine >= 0) & (mine < rows)
        found = F.embedding(mine.where(here, 0), self.weight) * here[..., None]
        output: Tensor = ScatterSequence.apply(found, self.tp)  # type: ignore[no-untyped-call]
        return output


class Norm(nn.RMSNorm):
    """A norm of this rank's slice of the sequence; its weight is whole on every rank."""

    def __init__(self, *, marked: bool) -> None:
        super().__init__(HIDDEN, dtype=torch.float64)
        weight: Any = self.weight
        weight.sequence_parallel = marked


class Layer(nn.Module):
    """One layer of the transformer."""

    def __init__(self, tp: Tensors, *, marked: bool) -> None:
        super().__init__()
        self.input_norm = Norm(marked=marked)
        self.linear_qkv = ColumnParallelLinear(tp, HIDDEN, HIDDEN + 2 * GROUPS * HEAD_DIM)
        self.linear_proj = RowParallelLinear(tp, HIDDEN, HIDDEN)
        self.pre_mlp_norm = Norm(marked=marked)
        self.linear_fc1 = ColumnParallelLinear(tp, HIDDEN, 2 * FFN, stride=2)
        self.linear_fc2 = RowParallelLinear(tp, FFN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then feed forward, both with a residual."""
        # Features of one group of heads: its queries, then its key, then its value.
        grouped = self.linear_qkv(self.input_norm(x)).unflatten(-1, (-1, PER_GROUP + 2, HEAD_DIM))
        q, k, v = (
            part.flatten(2, 3).permute(1, 2, 0, 3)
            for part in grouped.split([PER_GROUP, 1, 1], dim=3)
        )
        k, v = (part.repeat_interleave(PER_GROUP, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear_proj(mixed.permute(2, 0, 1, 3).flatten(2))
        gate, up = self.linear_fc1(self.pre_mlp_norm(x)).chunk(2, dim=-1)
        output: Tensor = x + self.linear_fc2(F.silu(gate) * up)
        return output


class Model(nn.Module):
    """A decoder without position embeddings, which is enough here."""

    def __init__(self, tp: Tensors, *, marked: bool) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(tp)
        self.layers = nn.ModuleList(Layer(tp, marked=marked) for _ in range(LAYERS))
        self.final_norm = Norm(marked=marked)
        self.output_layer = ColumnParallelLinear(tp, HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of the vocabulary, ``[S, B, VOCAB/tp]``."""
        x = self.word_embeddings(tokens.t())
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.output_layer(self.final_norm(x))
        return logits


def reduce_marked(model: Model, tp: Tensors) -> None:
    """Sum the gradients of weights that every rank holds and used on its slice only."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            parameter.grad = tp.all_reduce(parameter.grad)


def clip(model: Model, tp: Tensors) -> None:
    """Clip by the norm of all gradients: shards are summed up, copies counted once."""
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        is_shard = getattr(parameter, "tensor_model_parallel", False)
        if parameter.grad is not None and (is_shard or tp.rank == 0):
            squares += parameter.grad.square().sum()
    norm = tp.all_reduce(squares).sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)


def train(trace: str, *, reference: bool = False, fault: bool = False) -> None:
    """Train for a few steps: on one process, or on every rank of a world of 2."""
    torch.manual_seed(0)
    tp = Tensors(None if reference else dist.group.WORLD)
    model = Model(tp, marked=not fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    mesh = None if reference else {"tp": tp.group}  # paralign
    rec = pa.record(trace, model, mesh=mesh, optimizer=optimizer, steps=STEPS).start()  # paralign
    for step in range(STEPS):
        tokens, labels = text_batch(step)
        num_tokens = int((labels != -100).sum())
        loss_sum: Tensor = VocabParallelLoss.apply(model(tokens), labels.t(), tp)  # type: ignore[no-untyped-call]
        (loss_sum / num_tokens).backward()
        rec.loss(loss_sum, tokens=num_tokens)  # paralign
        reduce_marked(model, tp)
        clip(model, tp)
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
