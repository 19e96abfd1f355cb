"""Computed in fewer digits than was said: parts that had to stay wide, sums that were narrow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import paralign.parallel.data
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun
from paralign.prove.faults.forward import after_module, cores
from paralign.prove.faults.pieces import local


def _narrow(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@fault(component="forward", cause="precision")
def attention_in_bfloat16(run: FaultRun) -> None:
    """Queries, keys and values enter the softmax of attention in bfloat16."""

    def enter(core: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_narrow(x) if isinstance(x, Tensor) and x.dim() == 4 else x for x in args)

    for core in cores(run):
        core.register_forward_pre_hook(enter)
        core.register_forward_hook(lambda core, args, out: _narrow(out))


@fault(needs={"whole_head"}, component="forward", cause="precision")
def logits_in_bfloat16(run: FaultRun) -> None:
    """Logits are made in bfloat16, and the loss of what is left of them in full."""
    after_module(run, "head", _narrow)


@fault(needs={"dp_shard"}, component="reduction", cause="precision")
def gradients_are_reduced_in_bfloat16(run: FaultRun) -> None:
    """FSDP sums gradients over ranks in bfloat16."""

    def policy(**settings: Any) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(**{**settings, "reduce_dtype": torch.bfloat16})

    run.patch(paralign.parallel.data, "MixedPrecisionPolicy", policy)
    run.rebuild()


@fault(needs={"accumulation"}, component="backward", cause="precision")
def gradients_are_accumulated_in_bfloat16(run: FaultRun) -> None:
    """A rank adds up the gradients of its micro-batches in a bfloat16 buffer."""
    known: set[int] = set()

    def round_sum(parameter: Tensor) -> None:
        assert parameter.grad is not None
        held = local(parameter.grad)
        held.copy_(_narrow(held))

    # Inside forward a module has its gathered weights, to which micro-batches add their gradients.
    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.is_leaf and parameter.requires_grad and id(parameter) not in known:
                known.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(round_sum)

    for root in run.modules:
        for module in root.modules():
            module.register_forward_pre_hook(enter)
