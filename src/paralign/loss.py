"""Cross entropy as a plain sum over tokens, so that the one normaliser can be global.

    loss of a step = sum over valid label tokens / number of valid label tokens of the global batch

The sum lives here; the division belongs to whoever knows the global count, see
:meth:`Program.step`. A mean per micro-batch or per rank would weigh tokens by how much padding
their neighbours have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from paralign.errors import LayoutError

IGNORE_INDEX = -100
"""The label of a position that is not predicted: padding, or the last token of a sequence."""


def shift_labels(tokens: Tensor) -> Tensor:
    """Return the next token of every position, and ``IGNORE_INDEX`` where there is none.

    Labels are made on whole sequences, before these are split over ranks: the label of a slice's
    last token is the first token of the next slice.

    Shapes:
        tokens: ``[B, S]`` int64, whole sequences.
        returns: ``[B, S]`` int64.
    """
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels[:, :-1] = tokens[:, 1:]
    return labels


def count_valid_tokens(labels: Tensor, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Count the labels that are predicted, as an int64 scalar on the device of ``labels``."""
    return (labels != ignore_index).sum()


class Predicted(NamedTuple):
    """Which tokens are predicted.

    Attributes:
        valid: ``[B, S]`` bool: the tokens here that have a valid label.
        num_tokens: How many there are in the whole step, which every loss is divided by.
        numbers: ``[B, S]`` int64: which tokens of the global batch these are; None: nobody asks.
    """

    valid: Tensor
    num_tokens: float
    numbers: Tensor | None = None


def predicted_of(batch: Mapping[str, Tensor]) -> Predicted | None:
    """Return which tokens of ``batch`` are predicted; None outside a training step.

    Args:
        batch: With ``labels`` and, while a step runs, ``num_tokens``; with ``numbers`` too, where
            routers are to be told which tokens they see.
    """
    if "num_tokens" not in batch:
        return None
    valid = batch["labels"] != IGNORE_INDEX
    return Predicted(valid, float(batch["num_tokens"]), batch.get("numbers"))


def token_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Sum the cross entropy of every valid token.

    Shapes (B rows, S positions here, V vocabulary):
        logits: ``[B, S, V]``; a DTensor sharded on the vocabulary holds ``[B, S, V / n]`` here.
        labels: ``[B, S]`` int64, already shifted, the same on the ``n`` ranks of the vocabulary.
        returns: scalar; 0 with zero gradients where no label is valid.

    Comm:
        none for plain logits. For logits sharded on the vocabulary two all-reduces of small numbers
        a token (the largest; the sum of exponentials and the label's own), never the logits.

    Args:
        logits: In any floating dtype; computed in float32 at least.
        labels: Next tokens.
        ignore_index: Labels to leave out.

    Returns:
        The sum, in float32, or float64 for float64 logits.

    Raises:
        LayoutError: The shapes do not belong together.
    """
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        raise LayoutError(
            f"logits of shape {tuple(logits.shape)} do not belong to labels of shape "
            f"{tuple(labels.shape)}: [B, S, V] and [B, S] are needed. Give the same rows and the "
            "same slice of the sequence to both."
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(logits, DTensor):
        return _sharded_cross_entropy_sum(logits, labels, ignore_index)
    return F.cross_entropy(
        logits.flatten(0, 1).to(dtype),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )


def _sharded_cross_entropy_sum(logits: DTensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum the cross entropy of logits of which each rank holds a part of the vocabulary."""
    vocabulary, degree = logits.shape[-1], logits.device_mesh.size()
    if len(logits.placements) != 1 or not logits.placements[0].is_shard(2) or vocabulary % degree:
        raise LayoutError(
            f"logits are placed {logits.placements} over {degree} ranks, with a vocabulary of "
            f"{vocabulary}: they must be [Shard(2)] on one axis that divides it."
        )
    first = logits.device_mesh.get_local_rank() * (vocabulary // degree)
    total: Tensor = _ShardedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.to_local().flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32)),
        labels.flatten(),
        first,
        ignore_index,
        logits.device_mesh.get_group(),
    )
    return total


class _ShardedCrossEntropy(torch.autograd.Function):
    """Shapes: T tokens, v words of the vocabulary here, words ``first .. first + v - 1``.

    Every rank gets the same sum, and starts the backward pass from it: the gradient of its own
    logits is whole, so nothing is sent backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Tv: Tensor,
        labels_T: Tensor,
        first: int,
        ignore_index: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        largest_T = logits_Tv.amax(-1)
        dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group)
        shifted_Tv = logits_Tv - largest_T.unsqueeze(-1)
        is_valid_T = labels_T != ignore_index
        is_here_T = (labels_T >= first) & (labels_T < first + logits_Tv.shape[-1]) & is_valid_T
        index_T1 = torch.where(is_here_T, labels_T - first, 0).unsqueeze(-1)
        label_T = shifted_Tv.gather(-1, index_T1).squeeze(-1).masked_fill(~is_here_T, 0.0)
        probability_Tv = shifted_Tv.exp_()
        # The third row counts who holds the label: nobody, if there is no such word.
        sums_3T = torch.stack([probability_Tv.sum(-1), label_T, is_here_T.to(label_T.dtype)])
        dist.all_reduce(sums_3T, group=group)
        probability_Tv /= sums_3T[0].unsqueeze(-1)
        ctx.save_for_backward(probability_Tv, index_T1, is_here_T, is_valid_T)
        loss_T = sums_3T[0].log() - sums_3T[1]
        loss_T = loss_T.masked_fill(sums_3T[2] == 0, float("nan"))
        return loss_T.masked_fill(~is_valid_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        probability_Tv, index_T1, is_here_T, is_valid_T = ctx.saved_tensors
        hit_T1 = is_here_T.to(probability_Tv.dtype).unsqueeze(-1)
        grad_Tv = probability_Tv.scatter_add(-1, index_T1, -hit_T1)
        grad_Tv.masked_fill_(~is_valid_T.unsqueeze(-1), 0.0)
        return grad_Tv.mul_(grads[0]), None, None, None, None
