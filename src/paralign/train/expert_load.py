"""How evenly tokens are spread over experts, counted over the whole global batch."""

from __future__ import annotations

import torch
import torch.distributed as dist

from paralign.mesh import Axis, fold
from paralign.models.router import named_routers
from paralign.program import Program


def expert_loads(program: Program) -> dict[str, float]:
    """Return the load of the busiest expert of every router of this rank, in the last step.

    It is a multiple of the mean: 1 is even, the number of experts is all tokens to one of them.
    Counted are valid tokens, over all micro-batches and ranks, in the last optimizer step.

    Comm:
        One all-reduce of a whole number per expert and router of this rank, over ``routed``; none
        where no stage of the rank has a router.
    """
    routers = named_routers(program.modules)
    if not routers:
        return {}
    counts = []
    for router in routers.values():
        taken = router.tally.taken
        empty = torch.zeros(router.sizes.num_experts, dtype=torch.int64, device=program.device)
        counts.append(empty if taken is None else taken)
    flat = torch.cat(counts)  # a copy: what was counted stays as it is
    dist.all_reduce(flat, group=fold(program.mesh, Axis.ROUTED).get_group())
    loads = {}
    for name, total in zip(routers, flat.split([len(one) for one in counts]), strict=True):
        loads[name] = float(total.max()) * len(total) / max(1.0, float(total.sum()))
    return loads
