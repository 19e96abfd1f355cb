"""What all ranks agree on in a step: one batch, one loss, gradients that are final.

A rank that sees something wrong must not raise alone, or the others would wait for it. Everything
is told in one all-reduce, and every rank raises the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.batch import LocalBatch
from paralign.errors import AlignError, DataError
from paralign.mesh import Degrees


def agree_on_shapes(batch: LocalBatch, degrees: Degrees) -> None:
    """Compare shapes before ranks send each other tensors: unlike ones abort or hang.

    Comm:
        One all-gather of a small object over the world.

    Raises:
        DataError: The ranks were given batches of different shapes.
    """
    mine = (batch.seq_len, *batch.tensors["tokens"].shape)
    everyone: list[tuple[int, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if len(set(everyone)) > 1:
        _raise_different_batches([str(shape) for shape in everyone], degrees)


def agree_on_loss(
    local_loss: Tensor | None,
    batch: LocalBatch,
    *,
    degrees: Degrees,
    device: torch.device,
    problems: Sequence[str] = (),
    balance: Tensor | None = None,
) -> tuple[float, float]:
    """Add up what the ranks have of the loss and of what routers add to it.

    Comm:
        One all-reduce of six float64 numbers over the world.

    Args:
        local_loss: This rank's part; None: it has none, or another rank has the same.
        batch: What the rank was given.
        degrees: Size of every axis.
        device: Where numbers are reduced.
        problems: What is wrong with this rank's gradients.
        balance: This rank's part of what routers add.

    Returns:
        Both sums, equal on every rank.

    Raises:
        AlignError: A rank has problems; on every rank.
        DataError: The ranks were given different batches; on every rank.
    """
    fingerprint = float(batch.fingerprint)
    shared = torch.zeros(6, dtype=torch.float64, device=device)
    shared[2], shared[3], shared[4] = fingerprint, fingerprint**2, len(problems)
    if local_loss is not None:
        shared[0] = local_loss
        shared[1] = batch.num_local_tokens
    if balance is not None:
        shared[5] = balance
    dist.all_reduce(shared)
    loss, num_tokens, total, squares, num_problems, extra = shared.tolist()
    if num_problems:
        _raise_not_final(problems, degrees)
    # All fingerprints are equal if and only if their variance is zero. Both sums are exact in
    # float64; their products may need more digits than it has.
    if int(total) ** 2 != int(squares) * dist.get_world_size():
        prints: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(prints, batch.fingerprint)
        _raise_different_batches([str(one) for one in prints], degrees)
    if num_tokens != batch.num_global_tokens:
        raise DataError(
            f"the ranks hold {int(num_tokens)} valid tokens of {batch.num_global_tokens} in "
            "the global batch. Pass step what program.shard returned, unchanged."
        )
    return loss, extra


def _raise_not_final(problems: Sequence[str], degrees: Degrees) -> None:
    """Raise on every rank, also where all is well, so that none waits for the others."""
    everyone: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, list(problems))
    lines = [
        f"  - [{degrees.describe_rank(rank)}] {problem}"
        for rank, found in enumerate(everyone)
        for problem in found
    ]
    raise AlignError("\n".join(["gradients are not final:", *lines]))


def _raise_different_batches(by_rank: Sequence[str], degrees: Degrees) -> None:
    common = max(set(by_rank), key=by_rank.count)
    odd = [degrees.describe_rank(r) for r, one in enumerate(by_rank) if one != common]
    raise DataError(
        f"the ranks were given different global batches: {'; '.join(odd)} differ from the "
        "others. Read the same global batch on every rank (one sampler seed, no rank offset); "
        "program.shard cuts it."
    )
