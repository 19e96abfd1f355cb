"""Gradients that a rank computes or adds up wrong, though its forward is right."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paralign.models.decoder import DecoderBlueprint
from paralign.parallel.pipeline import PipelineRuntime
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import is_norm, layer_number, local_gradients


def _only_some_micro_batches_count(run: FaultRun, counts: Any) -> None:
    """Let the gradient of a micro-batch's loss be zero unless ``counts(number)``."""
    calls = {"made": 0}
    pieces = run.config.pipeline.num_microbatches

    def loss(self: PipelineRuntime, loss_sum: Tensor, labels: Tensor) -> Tensor:
        number = calls["made"] % pieces
        calls["made"] += 1
        right = loss_sum / self._normaliser
        return right if counts(number) else right.detach() + 0.0 * right

    run.patch(PipelineRuntime, "_loss", loss)


@fault(needs={"accumulation"}, component="backward", cause="missing_contribution")
def only_the_last_micro_batch_counts(run: FaultRun) -> None:
    """Each micro-batch's backward overwrites the gradients of the one before."""
    last = run.config.pipeline.num_microbatches - 1
    _only_some_micro_batches_count(run, lambda number: number == last)


@fault(needs={"accumulation"}, component="backward", cause="missing_contribution")
def the_first_micro_batch_is_lost(run: FaultRun) -> None:
    """Gradients are cleared between the first and the second micro-batch."""
    _only_some_micro_batches_count(run, lambda number: number > 0)


@fault(needs={"accumulation", "whole_head"}, component="backward", cause="missing_contribution")
def the_head_lacks_a_micro_batch(run: FaultRun) -> None:
    """The head's weight is reduced before the last micro-batch has added its gradient."""
    pieces = run.config.pipeline.num_microbatches
    calls = {"made": 0}

    def epilogue(self: DecoderBlueprint, parts: Any, x: Tensor, context: Any) -> Tensor:
        if not x.is_meta:  # shapes are found on the meta device
            calls["made"] += 1
        late = calls["made"] % pieces == 0
        head, hidden = parts.head, parts.norm(x)
        # Called, so that the unit around it is gathered and reduced as ever.
        logits: Tensor = head(hidden)
        if not late:
            return logits
        weight = head.weight.detach()
        return F.linear(hidden, weight, head.bias) + 0.0 * logits

    run.patch(DecoderBlueprint, "epilogue", epilogue)


@fault(needs={"accumulation"}, component="backward", cause="constant_factor")
def gradients_divided_by_the_micro_batches_again(run: FaultRun) -> None:
    """The schedule divides gradients by the micro-batches although the loss is global."""
    pieces = run.config.pipeline.num_microbatches

    def divide() -> None:
        for _, grad in local_gradients(run):
            grad.div_(pieces)

    run.after_backward(divide)


@fault(component="backward", cause="single_rank", any_program=True)
def one_ranks_gradients_are_off(run: FaultRun) -> None:
    """What one rank adds to its gradients is a thousandth too large: a bad kernel or chip."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return

    def scale() -> None:
        for number, (_, grad) in enumerate(local_gradients(run)):
            noise = torch.Generator().manual_seed(number)
            grad.mul_(1 + 1e-3 * torch.rand(grad.shape, generator=noise, dtype=grad.dtype))

    run.after_backward(scale)


@fault(component="backward", cause="precision", any_program=True)
def gradients_pass_through_bfloat16(run: FaultRun) -> None:
    """Gradients are cast to bfloat16 and back on their way to the optimizer."""

    def cast() -> None:
        for _, grad in local_gradients(run):
            grad.copy_(grad.bfloat16().to(grad.dtype))

    run.after_backward(cast)


@fault(component="backward", cause="precision")
def a_fused_kernel_rounds_query_gradients(run: FaultRun) -> None:
    """The backward of attention rounds the gradient of q to few bits; it adds up with depth."""
    for module in run.modules:
        for name, core in module.named_modules():
            if name.endswith("attention.core"):
                core.register_forward_pre_hook(_round_q)


def _round_q(core: Any, args: tuple[Any, ...]) -> None:
    if args[0].requires_grad:
        args[0].register_hook(lambda grad: grad.bfloat16().to(grad.dtype))


@fault(needs={"cp", "gathered_kv"}, component="backward", axes={"cp"}, cause="missing_reduction")
def gathered_keys_keep_only_their_own_gradient(run: FaultRun) -> None:
    """The backward of the gathered K and V keeps each rank's own slice instead of the sum."""
    from paralign import collectives

    gather = collectives._AllGatherStack

    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0][dist.get_rank(ctx.group)].contiguous()

    run.patch(gather, "backward", staticmethod(backward))


@fault(needs={"cp", "ulysses"}, component="backward", axes={"cp"}, cause="permuted_shards")
def exchanged_heads_come_back_in_another_order(run: FaultRun) -> None:
    """The backward of the all-to-all puts the ranks' pieces together in the reverse order."""
    size = run.mesh["cp"].size()
    for module in run.modules:
        for name, core in module.named_modules():
            if name.endswith("attention.core"):
                core.register_forward_pre_hook(
                    lambda core, args: _reverse_pieces(args[0], size)  # heads are dim 1
                )


def _reverse_pieces(q: Tensor, size: int) -> None:
    if q.requires_grad:
        q.register_hook(lambda grad: torch.cat(grad.chunk(size, 1)[::-1], 1))


@fault(component="backward", cause="missing_contribution", any_program=True)
def one_layer_gets_no_gradient(run: FaultRun) -> None:
    """The gradients of one layer are never written: its hooks were lost on a copy."""

    def drop() -> None:
        for _, grad in local_gradients(run, lambda name: layer_number(name) == 1):
            grad.zero_()

    run.after_backward(drop)


@fault(component="backward", cause="constant_factor", any_program=True)
def gradients_of_norms_are_counted_twice(run: FaultRun) -> None:
    """Weights of norms get their gradient from two places that both add it."""

    def double() -> None:
        for _, grad in local_gradients(run, is_norm):
            grad.mul_(2)

    run.after_backward(double)
