"""Cross entropy as a plain sum over tokens, so that the one normaliser can be global.

    loss of a step = sum over valid label tokens / number of valid label tokens of the global batch

The sum lives here; the division belongs to whoever knows the global count, see
:meth:`Program.step`. A mean per micro-batch or per rank would weigh tokens by how much padding
their neighbours have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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


def token_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """Sum the cross entropy of every valid token.

    Shapes (B rows, S positions here, V vocabulary):
        logits: ``[B, S, V]``.
        labels: ``[B, S]`` int64, already shifted.
        returns: scalar; 0 with zero gradients where no label is valid.

    Comm:
        none.

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
    return F.cross_entropy(
        logits.flatten(0, 1).to(dtype),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
