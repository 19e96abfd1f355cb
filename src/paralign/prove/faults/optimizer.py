"""Optimizers with other options, or that do not move what they should."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import is_norm, local


@fault(needs={"pp"}, component="config", axes={"pp"}, cause="different_config", any_program=True)
def later_stages_have_another_learning_rate(run: FaultRun) -> None:
    """The scheduler steps once for each stage a rank has passed."""
    if run.coordinate["pp"] == 0:
        return

    def change(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = run.config.optimizer.lr * 0.9

    run.before_step(change)


@fault(component="config", cause="different_config", any_program=True)
def weight_decay_is_off(run: FaultRun) -> None:
    """A refactoring of parameter groups lost the weight decay."""

    def change(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

    run.before_step(change)


@fault(component="config", cause="different_config", any_program=True)
def a_layer_is_frozen_by_mistake(run: FaultRun) -> None:
    """``requires_grad_(False)`` reached the weights of one layer after they were wrapped."""
    chosen = [p for n, p in run.parameters.items() if n.startswith("layers.1.ffn.")]

    def forget() -> None:
        for parameter in chosen:
            parameter.grad = None

    for parameter in chosen:
        parameter.requires_grad_(False)
    run.after_backward(forget)


@fault(component="optimizer", cause="missing_contribution", any_program=True)
def the_optimizer_does_not_know_the_norms(run: FaultRun) -> None:
    """The optimizer was built before the norms were replaced, so that nothing moves them."""
    chosen = [p for n, p in run.parameters.items() if is_norm(n)]

    def forget(optimizer: Optimizer) -> None:
        for parameter in chosen:
            parameter.grad = None

    run.before_step(forget)


@fault(component="optimizer", cause="single_rank", any_program=True)
def one_ranks_optimizer_is_behind(run: FaultRun) -> None:
    """One rank's loss scaler saw an overflow and skipped the step; the others took it."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return

    def skip(optimizer: Optimizer) -> None:
        for parameter in run.parameters.values():
            parameter.grad = None

    run.before_step(skip)


@fault(needs={"steps", "adamw"}, component="optimizer", cause="precision", any_program=True)
def second_moments_are_kept_in_bfloat16(run: FaultRun) -> None:
    """The optimizer stores its second moment in bfloat16 between steps."""

    def cast(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            value = local(state["exp_avg_sq"])
            value.copy_(value.bfloat16().to(value.dtype))

    run.after_step(cast)


@fault(needs={"adamw"}, component="optimizer", cause="constant_factor", any_program=True)
def gradients_are_unscaled_twice(run: FaultRun) -> None:
    """Gradients are divided by a loss scale of 8 once more, after they were clipped."""

    def unscale(optimizer: Optimizer) -> None:
        for parameter in run.parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).div_(8.0)

    run.before_step(unscale)


@fault(needs={"adamw"}, component="state", cause="stale", any_program=True)
def adam_starts_at_its_second_step(run: FaultRun) -> None:
    """A synthetic warm-up step was taken back, but not the step count of Adam."""

    def warm(optimizer: Optimizer) -> None:
        for parameter in run.parameters.values():
            if parameter.grad is not None and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    run.before_step(warm)
