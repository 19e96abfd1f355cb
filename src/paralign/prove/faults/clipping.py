"""Norms that count too much or too little, and clipping that does not follow them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.parallel.tensor_weights import is_replicated
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import local_gradients

MODEL_AXES = ("pp", "dp_shard", "cp", "tp")  # parameters are spread over these


def _norm_over(
    run: FaultRun,
    axes: tuple[str, ...],
    counts: Callable[[str], bool] = lambda name: True,
    *,
    count_tied: bool = False,
    count_copies: bool = False,
) -> None:
    """Let the gradient norm be that of what the ranks of ``axes`` hold.

    What every tp rank holds counts once, or with ``count_copies`` on each of them.
    """
    aliases = {} if count_tied else run.program.tied_aliases
    copies = 1 if count_copies or "tp" not in axes else run.mesh["tp"].size()

    def norm() -> Tensor:
        squares = torch.zeros((), dtype=torch.float64)
        for name, grad in local_gradients(run, lambda n: n not in aliases and counts(n)):
            held = copies if is_replicated(run.parameters[name], "tp") else 1
            squares += grad.double().square().sum() / held
        for axis in axes:
            dist.all_reduce(squares, group=run.mesh[axis].get_group())
        return squares.sqrt()

    run.patch(run.program, "grad_norm", norm)


def _without(axis: str) -> tuple[str, ...]:
    return tuple(other for other in MODEL_AXES if other != axis)


@fault(needs={"pp", "clip"}, component="clipping", axes={"pp"}, cause="wrong_norm")
def each_stage_clips_by_its_own_norm(run: FaultRun) -> None:
    """The norm is not summed over pipeline stages."""
    _norm_over(run, _without("pp"))


@fault(needs={"dp_shard", "clip"}, component="clipping", axes={"dp_shard"}, cause="wrong_norm")
def norm_of_the_own_shards(run: FaultRun) -> None:
    """The norm is not summed over dp_shard, where the shards are."""
    _norm_over(run, _without("dp_shard"))


@fault(needs={"cp", "clip"}, component="clipping", axes={"cp"}, cause="wrong_norm")
def norm_of_the_own_cp_ranks_shards(run: FaultRun) -> None:
    """The norm is not summed over cp, which parameters are sharded over too."""
    _norm_over(run, _without("cp"))


@fault(
    needs={"dp_replicate", "clip"}, component="clipping", axes={"dp_replicate"}, cause="wrong_norm"
)
def norm_counts_every_replica(run: FaultRun) -> None:
    """The squares are summed over the world, so that each replica counts again."""
    _norm_over(run, (*MODEL_AXES, "dp_replicate"))


@fault(needs={"tp", "clip"}, component="clipping", axes={"tp"}, cause="wrong_norm")
def norm_counts_replicated_weights_on_every_tp_rank(run: FaultRun) -> None:
    """Squares are summed over tp, so that what every rank holds counts once for each rank."""
    _norm_over(run, MODEL_AXES, count_copies=True)


@fault(needs={"tp", "clip"}, component="clipping", axes={"tp"}, cause="wrong_norm")
def norm_of_the_own_tp_parts(run: FaultRun) -> None:
    """The norm is not summed over tp, so that each rank clips by its own part."""
    _norm_over(run, _without("tp"))


@fault(needs={"pp", "tied", "clip"}, component="clipping", axes={"pp"}, cause="wrong_norm")
def norm_counts_tied_copies_twice(run: FaultRun) -> None:
    """Embedding and head are one parameter and count as two."""
    _norm_over(run, MODEL_AXES, count_tied=True)


@fault(needs={"clip", "untied"}, component="clipping", cause="wrong_norm")
def norm_leaves_out_the_head(run: FaultRun) -> None:
    """The head is in another parameter group, which the norm does not see."""
    _norm_over(run, MODEL_AXES, lambda name: not name.startswith("head."))


@fault(needs={"clip"}, component="clipping", cause="constant_factor")
def gradients_are_never_clipped(run: FaultRun) -> None:
    """The norm is computed and logged, and gradients stay as they are."""
    run.patch(run.program, "clip_grad_norm_", lambda largest: run.program.grad_norm())


@fault(needs={"clip"}, component="clipping", cause="constant_factor")
def gradients_are_clipped_to_half_of_the_limit(run: FaultRun) -> None:
    """The coefficient is applied once by the optimizer wrapper and once by the loop."""
    clip = run.program.clip_grad_norm_

    def both(largest: float) -> Tensor:
        norm: Tensor = clip(largest)
        for _, grad in local_gradients(run):
            grad.mul_(0.5)
        return norm

    run.patch(run.program, "clip_grad_norm_", both)


@fault(needs={"clip"}, component="clipping", cause="reported_value")
def reported_norm_is_that_after_clipping(run: FaultRun) -> None:
    """The logged norm is computed after gradients were clipped."""
    clip = run.program.clip_grad_norm_

    def late(largest: float) -> Tensor:
        clip(largest)
        norm: Tensor = run.program.grad_norm()
        return norm

    run.patch(run.program, "clip_grad_norm_", late)
