"""What a run keeps between steps, as tensors by global name and as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from paralign.errors import TrainingError
from paralign.program import Program
from paralign.weights.folders import OPTIMIZER

# What optimizers keep for every element of a parameter; their count of steps is one number.
_PER_ELEMENT = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}


def tensors_of(program: Program, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return this rank's parameters, router biases and optimizer state, by global name.

    The optimizer's state is made if it has none yet, so that the tensors can be filled as well as
    saved. A tied pair has one entry; see :func:`tensors_of_copies`.
    """
    make_state(optimizer)
    parameters = dict(program.named_parameters())
    owned = {name: name for name in parameters if name not in program.tied_aliases}
    return program.state_dict() | _state_of(optimizer, parameters, owned)


def tensors_of_copies(program: Program, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the second copies of tied pairs on this rank, under the names of the first ones.

    Fill them after those of :func:`tensors_of`: a rank may hold both.
    """
    make_state(optimizer)
    parameters = dict(program.named_parameters())
    copies = {alias: one for alias, one in program.tied_aliases.items() if alias in parameters}
    weights: dict[str, Tensor] = {one: parameters[alias].detach() for alias, one in copies.items()}
    return weights | _state_of(optimizer, parameters, copies)


def _state_of(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], names: Mapping[str, str]
) -> dict[str, Tensor]:
    return {
        f"{OPTIMIZER}{key}.{saved_as}": value
        for name, saved_as in names.items()
        for key, value in optimizer.state[parameters[name]].items()
        if key != "step" and isinstance(value, Tensor)
    }


def make_state(optimizer: Optimizer) -> None:
    """Give a new optimizer the state that it would have before its first step."""
    keys = _PER_ELEMENT[type(optimizer).__name__]
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state or not parameter.requires_grad:
                continue
            state |= {key: torch.zeros_like(parameter) for key in keys}
            if isinstance(optimizer, torch.optim.AdamW):
                device = parameter.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)


def num_optimizer_steps(optimizer: Optimizer, device: torch.device) -> int:
    """Return how many steps the optimizer has made on all ranks; 0 for one that does not count.

    Comm:
        One all-reduce of two numbers over the world: a rank whose parameters are all frozen has
        nothing to count by.

    Raises:
        TrainingError: Parameters have made different numbers of steps.
    """
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    least = min(counts, default=torch.iinfo(torch.int64).max)
    ends = torch.tensor([max(counts, default=0), -least], device=device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most > least:
        raise TrainingError(
            f"the optimizer has made {least} steps for some parameters and {most} for others, "
            "which a checkpoint cannot hold. Freeze parameters before training, not in between."
        )
    return most


def set_optimizer_steps(optimizer: Optimizer, num_steps: int) -> None:
    """Set what :func:`num_optimizer_steps` returns."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(float(num_steps))


def non_finite(named: Iterable[tuple[str, nn.Parameter]]) -> Mapping[str, Any]:
    """Return the parameters of which this rank's part of the gradient is not finite, and why."""
    found = {}
    for name, parameter in named:
        grad = parameter.grad
        if grad is None:
            continue
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        if not bool(torch.isfinite(local).all()):
            found[name] = "NaN" if bool(torch.isnan(local).any()) else "infinite"
    return found
