"""What is computed again in the backward pass, and is not the same the second time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import paralign.models.router
from paralign.models.router import Router
from paralign.prove.fault import fault
from paralign.prove.fault_run import FaultRun


def _is_again() -> bool:
    """Whether a forward runs inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


@fault(needs={"experts", "recompute"}, component="backward", cause="rng")
def experts_are_chosen_anew_in_the_recomputation(run: FaultRun) -> None:
    """Routers add noise to scores, and draw other noise when a layer is computed again."""
    right = Router._select
    generator = torch.Generator().manual_seed(0)

    def select(self: Router, scores: Tensor) -> Tensor:
        if _is_again():
            noise = torch.rand(scores.shape, generator=generator, dtype=scores.dtype)
            scores = scores * (0.5 + noise)
        return right(self, scores)

    run.patch(Router, "_select", select)


@fault(needs={"balance_loss", "recompute"}, component="loss", cause="reported_value")
def recomputed_routers_count_again(run: FaultRun) -> None:
    """The balance loss that is reported has every layer twice: the recomputation adds its own."""
    run.patch(paralign.models.router, "_inside_backward", lambda: False)


@fault(needs={"recompute"}, component="backward", cause="precision")
def layers_are_recomputed_in_bfloat16(run: FaultRun) -> None:
    """The recomputation runs outside the region that keeps its input in full precision."""

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not _is_again():
            return None
        return (args[0].bfloat16().to(args[0].dtype), *args[1:])

    for root in run.modules:
        for name, module in root.named_modules():
            if name.endswith("ffn_norm"):
                module.register_forward_pre_hook(enter)
