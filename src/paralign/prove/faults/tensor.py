"""Tensor and sequence parallelism gone wrong: sums left out, made twice, or of the wrong part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import paralign.loss
import paralign.program
from paralign.batch import LocalBatch
from paralign.collectives import all_gather_dim, reduce_scatter_dim
from paralign.local_weights import local_parameters
from paralign.parallel.tensor_base import Region
from paralign.parallel.tensor_styles import ColumnParallel
from paralign.parallel.tensor_weights import is_replicated, sum_partial_gradients
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import is_norm, local, only_some_partial_sums

SEQUENCE = 1  # the dim of the stream [B, S, H] that tp cuts


def _named(run: FaultRun, end: str) -> list[nn.Module]:
    """Return this rank's modules whose name ends like this."""
    return [
        inner for module in run.modules for n, inner in module.named_modules() if n.endswith(end)
    ]


@fault(needs={"tp"}, component="reduction", axes={"tp"}, cause="missing_reduction")
def norms_are_not_summed_over_tp(run: FaultRun) -> None:
    """Norm weights see only a rank's part of the sequence, and their gradients stay that part's."""
    only_some_partial_sums(run, lambda name: not is_norm(name))


@fault(needs={"tp", "shared_heads"}, component="reduction", axes={"tp"}, cause="missing_reduction")
def shared_key_heads_are_not_summed_over_tp(run: FaultRun) -> None:
    """Ranks that share a key head keep the gradient of their own query heads."""
    only_some_partial_sums(run, lambda name: "attention.w" not in name)


@fault(needs={"tp"}, component="reduction", axes={"tp"}, cause="constant_factor")
def replicated_weights_are_averaged_over_tp(run: FaultRun) -> None:
    """Gradients of what every tp rank holds are averaged, although each has a part of the sum."""
    degree = run.mesh["tp"].size()

    def average(parameters: Any, group: dist.ProcessGroup) -> None:
        sum_partial_gradients(parameters, group)
        for parameter in parameters:
            local(parameter.grad).div_(degree)

    run.patch(paralign.program, "sum_partial_gradients", average)


@fault(needs={"tp"}, component="reduction", axes={"tp"}, cause="double_reduction")
def replicated_weights_are_summed_twice(run: FaultRun) -> None:
    """Gradients of what every tp rank holds are summed by a hook and once more by the loop."""

    def twice(parameters: Any, group: dist.ProcessGroup) -> None:
        sum_partial_gradients(parameters, group)
        sum_partial_gradients(parameters, group)

    run.patch(paralign.program, "sum_partial_gradients", twice)


def _row_parallel_without_sum(run: FaultRun, end: str) -> None:
    """Let a row-parallel linear return its own part of the sum, cut as the stream is."""
    rank, degree = run.coordinate["tp"], run.mesh["tp"].size()
    for linear in _named(run, end):
        assert isinstance(linear, nn.Linear)

        def forward(x: Tensor, linear: nn.Linear = linear) -> Tensor:
            with local_parameters(linear):
                part = F.linear(x, linear.weight).chunk(degree, SEQUENCE)[rank]
                return part if linear.bias is None else part + linear.bias

        run.patch(linear, "forward", forward)


@fault(needs={"tp"}, component="forward", axes={"tp"}, cause="missing_reduction")
def attention_output_is_not_summed_over_tp(run: FaultRun) -> None:
    """Each rank goes on with what its own heads add to the stream; the shape is right."""
    for end in ("attention.wo", "attention.out"):
        _row_parallel_without_sum(run, end)


@fault(needs={"tp"}, component="forward", axes={"tp"}, cause="missing_reduction")
def feed_forward_is_not_summed_over_tp(run: FaultRun) -> None:
    """Each rank goes on with what its own features add to the stream."""
    _row_parallel_without_sum(run, "ffn.down")


class _GatherWithoutSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
        ctx.place = rank, dist.get_world_size(group)
        return all_gather_dim(x, dim=SEQUENCE, group=group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rank, degree = ctx.place
        return grads[0].chunk(degree, SEQUENCE)[rank].contiguous(), None, None


@fault(needs={"tp"}, component="backward", axes={"tp"}, cause="missing_reduction")
def gradients_into_the_stream_are_not_summed_over_tp(run: FaultRun) -> None:
    """The backward of a gathered input keeps the rank's own slice instead of the ranks' sum."""

    def enter(self: Region, x: Tensor) -> Tensor:
        whole: Tensor = _GatherWithoutSum.apply(x, self.rank, self.group)  # type: ignore[no-untyped-call]
        return whole

    run.patch(Region, "enter", enter)


@fault(needs={"tp", "latent"}, component="reduction", axes={"tp"}, cause="double_reduction")
def rotary_key_gradients_are_summed_twice(run: FaultRun) -> None:
    """What all heads give to the shared rotary key is summed over tp by two layers of code."""
    group = run.mesh["tp"].get_group()

    def again(key: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: _sum_of_equals(grad, group))

    for key in _named(run, "rotary_key"):
        key.register_forward_pre_hook(again)


def _sum_of_equals(grad: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather slices that are sums already, and sum what every rank now holds whole once more."""
    whole = all_gather_dim(grad, dim=SEQUENCE, group=group)
    return reduce_scatter_dim(whole, dim=SEQUENCE, group=group)


@fault(needs={"tp"}, component="forward", axes={"tp"}, cause="permuted_shards")
def slices_gathered_in_another_order(run: FaultRun) -> None:
    """Sequence slices are put together in the reverse order of the ranks."""

    def enter(self: Region, x: Tensor) -> Tensor:
        whole = all_gather_dim(x, dim=SEQUENCE, group=self.group)
        return torch.cat(whole.chunk(self.degree, SEQUENCE)[::-1], SEQUENCE)

    run.patch(Region, "enter", enter)


@fault(needs={"tp"}, component="forward", axes={"tp"}, cause="missing_contribution")
def vocabulary_mask_is_off_by_one(run: FaultRun) -> None:
    """The first word of every rank's part of the vocabulary is left to a rank that lacks it."""
    degree, rank = run.mesh["tp"].size(), run.coordinate["tp"]

    def lose(embedding: nn.Module, args: tuple[Tensor, ...], found: Tensor) -> Tensor:
        assert isinstance(embedding, nn.Embedding)
        is_first = args[0] % (embedding.num_embeddings // degree) == 0
        return found.masked_fill(is_first.chunk(degree, SEQUENCE)[rank].unsqueeze(-1), 0.0)

    for embedding in _named(run, "embedding"):
        embedding.register_forward_hook(lose)


@fault(needs={"tp", "shared_heads"}, component="forward", axes={"tp"}, cause="permuted_shards")
def key_heads_are_tiled_instead_of_repeated(run: FaultRun) -> None:
    """Ranks that share key heads take them in turn (0 1 0 1), not side by side (0 0 1 1)."""

    def rows(self: ColumnParallel, module: nn.Linear, region: Region) -> tuple[int, int]:
        assert self.num_heads is not None
        width = module.out_features // self.num_heads
        return region.rank % self.num_heads * width, width

    run.patch(ColumnParallel, "_rows", rows)
    run.rebuild()


@fault(needs={"tp"}, component="loss", axes={"tp"}, cause="missing_reduction")
def softmax_over_the_own_part_of_the_vocabulary(run: FaultRun) -> None:
    """The denominator of the softmax is summed over a rank's own words only."""

    class Local(paralign.loss._ShardedCrossEntropy):
        @staticmethod
        def forward(
            ctx: Any,
            logits_Tv: Tensor,
            labels_T: Tensor,
            first: int,
            ignore_index: int,
            group: dist.ProcessGroup,
        ) -> Tensor:
            is_valid_T = labels_T != ignore_index
            is_here_T = (labels_T >= first) & (labels_T < first + logits_Tv.shape[-1]) & is_valid_T
            index_T1 = torch.where(is_here_T, labels_T - first, 0).unsqueeze(-1)
            label_T = logits_Tv.gather(-1, index_T1).squeeze(-1).masked_fill(~is_here_T, 0.0)
            dist.all_reduce(label_T, group=group)
            ctx.save_for_backward(logits_Tv.softmax(-1), index_T1, is_here_T, is_valid_T)
            return (logits_Tv.logsumexp(-1) - label_T).masked_fill(~is_valid_T, 0.0).sum()

    run.patch(paralign.loss, "_ShardedCrossEntropy", Local)


@fault(needs={"tp"}, component="loss", axes={"tp"}, cause="constant_factor")
def loss_is_averaged_over_tp(run: FaultRun) -> None:
    """The loss that every tp rank computes whole is divided by their number before the backward."""
    degree = run.mesh["tp"].size()
    right = paralign.loss._ShardedCrossEntropy.backward

    class Averaged(paralign.loss._ShardedCrossEntropy):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return right(ctx, *(grad / degree for grad in grads))

    run.patch(paralign.loss, "_ShardedCrossEntropy", Averaged)


@fault(needs={"tp"}, component="weights", axes={"tp"}, cause="rng")
def tp_ranks_draw_other_norms(run: FaultRun) -> None:
    """Each tp rank draws the weights that all should hold from a generator of its own."""
    rank = run.coordinate["tp"]
    if rank == 0:
        return
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in run.parameters.items():
        if is_replicated(parameter, "tp"):
            piece = local(parameter)
            noise = torch.randn(piece.shape, generator=generator, dtype=piece.dtype)
            piece.copy_(1 + 0.05 * noise if is_norm(name) else 0.2 * noise)


@fault(needs={"tp"}, component="weights", axes={"tp"}, cause="permuted_shards")
def tp_parts_of_the_neighbour(run: FaultRun) -> None:
    """A checkpoint's tp parts are loaded by the neighbouring rank."""
    group = run.mesh["tp"].get_group()
    for name in sorted(run.parameters):
        parameter = run.parameters[name]
        if not is_replicated(parameter, "tp"):
            piece = local(parameter)
            everyone = [torch.empty_like(piece) for _ in range(run.mesh["tp"].size())]
            dist.all_gather(everyone, piece.contiguous(), group=group)
            piece.copy_(everyone[(run.coordinate["tp"] + 1) % len(everyone)])


@fault(needs={"tp"}, component="data", axes={"tp"}, cause="different_data")
def tp_ranks_read_other_rows(run: FaultRun) -> None:
    """The sampler deals rows by global rank, so that ranks of one layer see different ones."""
    rank = run.coordinate["tp"]

    def change(batch: LocalBatch) -> None:
        for name in ("tokens", "labels"):
            batch.tensors[name] = batch.tensors[name].roll(rank, 0)

    run.on_batch(change)


@fault(needs={"tp", "steps"}, component="state", axes={"tp"}, cause="stale")
def norms_move_on_one_tp_rank_only(run: FaultRun) -> None:
    """The optimizer's groups leave the weights that all tp ranks hold to the first of them."""
    if run.coordinate["tp"] == 0:
        return
    kept = {
        name: local(parameter).clone()
        for name, parameter in run.parameters.items()
        if is_replicated(parameter, "tp")
    }

    def put_back(optimizer: torch.optim.Optimizer) -> None:
        for name, old in kept.items():
            local(run.parameters[name]).copy_(old)

    run.after_step(put_back)
