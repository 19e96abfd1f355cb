"""What one step leaves behind for the next: gradients, moments, parameters."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.pieces import local, swap_


@fault(needs={"steps"}, component="state", cause="stale")
def gradients_are_never_cleared(run: FaultRun) -> None:
    """``zero_grad`` is missing, so that every step adds to the gradients of those before."""

    def keep(optimizer: Optimizer) -> None:
        run.patch(optimizer, "zero_grad", lambda *args, **kwargs: None)

    run.before_step(keep)


@fault(needs={"steps"}, component="state", cause="stale", any_program=True)
def the_next_forward_uses_old_parameters(run: FaultRun) -> None:
    """Parameters are gathered before the optimizer has written them, from a stale copy."""
    old: dict[str, Tensor] = {}

    def remember(optimizer: Optimizer) -> None:
        old.update({name: local(p).clone() for name, p in run.parameters.items()})

    def restore(optimizer: Optimizer) -> None:
        for name, parameter in run.parameters.items():
            local(parameter).copy_(old[name])

    run.before_step(remember)
    run.after_step(restore)


@fault(
    needs={"steps", "dp_shard"},
    component="state",
    axes={"dp_shard"},
    cause="stale",
    any_program=True,
)
def one_dp_rank_offers_old_shards(run: FaultRun) -> None:
    """One dp_shard rank's parameters are an offloaded copy from before the step."""
    if run.coordinate["dp_shard"] == 1:
        the_next_forward_uses_old_parameters.breaks(run)


@fault(needs={"steps"}, component="state", cause="stale", any_program=True)
def evaluation_leaves_averaged_parameters(run: FaultRun) -> None:
    """An evaluation puts averaged weights in place and does not put the trained ones back."""
    old: dict[str, Tensor] = {name: local(p).clone() for name, p in run.parameters.items()}

    def average(optimizer: Optimizer) -> None:
        for name, parameter in run.parameters.items():
            piece = local(parameter)
            piece.copy_(0.5 * piece + 0.5 * old[name])

    run.after_step(average)


@fault(needs={"steps", "adamw"}, component="state", cause="wrong_layer", any_program=True)
def moments_of_two_parameters_are_exchanged(run: FaultRun) -> None:
    """After a reload the first moments of two weights of one shape are in each other's place."""

    def exchange(optimizer: Optimizer) -> None:
        names = [n for n in run.parameters if n.endswith("attention.wq.weight")][:2]
        if len(names) == 2:
            first, second = (optimizer.state[run.parameters[name]] for name in names)
            if first and second:
                swap_(local(first["exp_avg"]), local(second["exp_avg"]))

    run.after_step(exchange)


@fault(needs={"steps", "adamw"}, component="state", cause="missing_contribution", any_program=True)
def first_moments_are_lost_between_steps(run: FaultRun) -> None:
    """The first moments are not in what is reloaded and start at zero again."""

    def forget(optimizer: Optimizer) -> None:
        for state in optimizer.state.values():
            if state:
                local(state["exp_avg"]).zero_()

    run.after_step(forget)
