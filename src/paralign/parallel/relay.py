"""The forward pass alone, handed from stage to stage: what evaluation needs of a pipeline.

Each rank runs its part of one order that all share, micro-batch after micro-batch and stage after
stage. Every message is received in the order in which it is sent, so nobody waits in a circle,
whatever stages a rank has and however little the backend buffers::

    rank 0   s0 m0 -> s0 m1 -> s0 m2
    rank 1            s1 m0    s1 m1    s1 m2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.parallel.stage import Stage


def run_forward(
    stages: Mapping[int, Stage],
    entries: Sequence[Tensor],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    rank_of: Callable[[int], int],
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[Tensor]:
    """Run every micro-batch through all stages.

    Comm:
        per micro-batch, one message between neighbouring stages on different ranks.

    Args:
        stages: Stage index -> module, those of this rank.
        entries: What goes into each stage of the whole pipeline; shape and dtype only.
        batches: The micro-batches: ``tokens`` and what else a stage is given.
        rank_of: Stage index -> rank in ``group``.
        group: The ranks of the pipeline.
        device: Where this rank computes.

    Returns:
        What the last stage returns for each micro-batch; empty on ranks without it.
    """
    me, last = dist.get_rank(group), len(entries) - 1
    results: list[Tensor] = []
    sent: tuple[dist.Work | None, Tensor] | None = None
    for batch in batches:
        x = batch["tokens"]
        for index in sorted(stages):
            if index and rank_of(index - 1) != me:
                x = torch.empty_like(entries[index], device=device, requires_grad=False)
                dist.recv(x, group=group, group_src=rank_of(index - 1))
            x = stages[index](x, **batch)
            if index == last:
                results.append(x)
            elif rank_of(index + 1) != me:
                _wait(sent)
                # Kept until it has been sent.
                sent = dist.isend(x, group=group, group_dst=rank_of(index + 1)), x
    _wait(sent)
    return results


def _wait(sent: tuple[dist.Work | None, Tensor] | None) -> None:
    if sent is not None and sent[0] is not None:
        sent[0].wait()
