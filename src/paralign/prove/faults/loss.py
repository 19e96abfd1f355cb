"""Wrong weights of tokens in the loss, and losses that are reported wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.loss import IGNORE_INDEX
from paralign.mesh import Axis, fold
from paralign.parallel.pipeline import PipelineRuntime
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun


def weigh(run: FaultRun, weight: Callable[[Tensor, float], Tensor | float]) -> None:
    """Let ``weight(labels, normaliser)`` be what a micro-batch's sum of losses is divided by."""

    def loss(self: PipelineRuntime, loss_sum: Tensor, labels: Tensor) -> Tensor:
        return loss_sum / weight(labels, self._normaliser)

    run.patch(PipelineRuntime, "_loss", loss)


def valid(labels: Tensor) -> Tensor:
    """Count the labels that are predicted; at least one, so that nothing is divided by zero."""
    return (labels != IGNORE_INDEX).sum().clamp(min=1)


@fault(needs={"accumulation", "padding"}, component="loss", cause="token_weighting")
def mean_of_micro_batch_means(run: FaultRun) -> None:
    """Every micro-batch counts alike, however many of its tokens are valid."""
    pieces = run.config.pipeline.num_microbatches
    ranks = run.config.mesh.degrees.dp * run.config.mesh.cp
    group = fold(run.mesh, Axis.LOSS).get_group() if ranks > 1 else None

    def weight(labels: Tensor, normaliser: float) -> Tensor:
        count = (labels != IGNORE_INDEX).sum()
        if group is not None:
            dist.all_reduce(count, group=group)
        return count.clamp(min=1) * pieces

    weigh(run, weight)


@fault(needs={"dp_shard", "padding"}, component="loss", axes={"dp_shard"}, cause="token_weighting")
def mean_over_each_dp_shard_ranks_own_tokens(run: FaultRun) -> None:
    """Each dp_shard rank divides by its own valid tokens, and the ranks are averaged."""
    _mean_over_own_tokens(run, "dp_shard")


@fault(needs={"cp", "padding"}, component="loss", axes={"cp"}, cause="token_weighting")
def mean_over_each_cp_ranks_own_tokens(run: FaultRun) -> None:
    """Each cp rank divides by the valid tokens of its slice, and the ranks are averaged."""
    _mean_over_own_tokens(run, "cp")


@fault(
    needs={"dp_replicate", "padding"},
    component="loss",
    axes={"dp_replicate"},
    cause="token_weighting",
)
def mean_over_each_replicas_own_tokens(run: FaultRun) -> None:
    """Each dp_replicate rank divides by its own valid tokens, and the ranks are averaged."""
    _mean_over_own_tokens(run, "dp_replicate")


def _mean_over_own_tokens(run: FaultRun, axis: str) -> None:
    others = [a for a in ("dp_replicate", "dp_shard", "cp") if a != axis]
    counts: dict[str, Tensor] = {}

    def count(batch: Any) -> None:
        total = (batch.tensors["labels"] != IGNORE_INDEX).sum()
        for other in others:
            dist.all_reduce(total, group=run.mesh[other].get_group())
        counts["own"] = total.clamp(min=1)

    run.on_batch(count)
    weigh(run, lambda labels, normaliser: counts["own"] * run.mesh[axis].size())


@fault(needs={"padding"}, component="loss", cause="token_weighting")
def padding_counts_as_tokens(run: FaultRun) -> None:
    """The sum over valid tokens is divided by all tokens, masked ones too."""
    batch = run.config.batch
    weigh(run, lambda labels, normaliser: float(batch.global_batch * batch.seq_len))


@fault(needs={"cp"}, component="loss", axes={"cp"}, cause="constant_factor")
def tokens_counted_once_per_cp_rank(run: FaultRun) -> None:
    """The number of tokens to divide by is summed over cp although it is global already."""
    weigh(run, lambda labels, normaliser: normaliser * run.mesh["cp"].size())


@fault(needs={"accumulation"}, component="loss", cause="constant_factor")
def divided_by_the_micro_batches_twice(run: FaultRun) -> None:
    """The loss is global already and is divided by the number of micro-batches once more."""
    pieces = run.config.pipeline.num_microbatches
    weigh(run, lambda labels, normaliser: normaliser * pieces)


@fault(needs={"pp"}, component="loss", axes={"pp"}, cause="reported_value")
def reported_loss_is_averaged_over_stages(run: FaultRun) -> None:
    """The logged loss is averaged over all pipeline ranks, of which one alone has a loss."""
    _report(run, lambda loss: loss / run.mesh["pp"].size())


@fault(needs={"cp"}, component="loss", axes={"cp"}, cause="reported_value")
def reported_loss_is_divided_by_cp(run: FaultRun) -> None:
    """The logged loss lacks the sum over cp ranks that training has."""
    _report(run, lambda loss: loss / run.mesh["cp"].size())


@fault(component="loss", cause="reported_value")
def reported_loss_is_smoothed(run: FaultRun) -> None:
    """The logged loss is a running mean that starts at another value."""
    _report(run, lambda loss: 0.9 * loss + 0.1 * torch.ones_like(loss))


def _report(run: FaultRun, change: Callable[[Tensor], Tensor]) -> None:
    step = run.program.step
    run.patch(run.program, "step", lambda batch: change(step(batch)))
