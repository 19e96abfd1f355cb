"""A softmax over a part of the vocabulary only: the loss is made again from the logits.

Where the vocabulary is cut over ranks, the denominator is a sum over all of them. Without it every
rank divides by its own words, and no gradient says so in a simple way; the loss does, exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.labels import IGNORED
from paralign.align.explain.own_parts import all_of
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.inspect.feed import role_of
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding, TensorRow

_MOST_LOGITS = 1 << 26  # larger ones are not read just for this
_SAME = 1e-9  # relative; below float64 that of the dtype


def explain_own_vocabulary(context: Context, step: int, row: TensorRow) -> Finding | None:
    """Return the finding that the loss is that of a softmax over one rank's words, if it is.

    Args:
        context: The comparison.
        step: The step.
        row: The loss, which is off, though the logits are right.
    """
    logits, labels = _logits(context, step), _labels(context, step)
    if logits is None or labels is None or row.worst_values is None:
        return None
    due, made = row.worst_values
    whole = all_of(logits.base).double()
    is_valid = labels != IGNORED
    if whole.shape[:2] != labels.shape or not bool(is_valid.any()):
        return None
    index = labels.masked_fill(~is_valid, 0).long().unsqueeze(-1)
    if not int(index.max()) < whole.shape[-1]:
        return None  # the head's output was not recorded, and this is another module's
    of_labels = whole.gather(-1, index).squeeze(-1)

    def loss(words: Tensor) -> float:
        each = (words.logsumexp(-1) - of_labels)[is_valid]
        return float(each.sum()) / int(is_valid.sum())

    beside = due - loss(whole)  # what balances experts, say
    accuracy = max(_SAME, 16 * context.budget.eps)
    for axis in context.mesh.live:
        degree = context.mesh.sizes[axis]
        if role_of(axis) != "tp" or whole.shape[-1] % degree:
            continue
        for number, words in enumerate(whole.chunk(degree, -1)):
            left = abs(loss(words) + beside - made) / abs(made or 1.0)
            if left <= accuracy:
                return _finding(context, row, axis, number, left)
    return None


def _logits(context: Context, step: int) -> Compared | None:
    """Return the last output of the forward pass, if it is right and small enough to read."""
    outputs = context.judged(Kind.OUTPUT, step)
    last = outputs[-1] if outputs else None
    if last is None or not last.row.ok or len(last.base.shape) != 3:
        return None
    return last if math.prod(last.base.shape) <= _MOST_LOGITS else None


def _labels(context: Context, step: int) -> Tensor | None:
    for item in context.judged(Kind.INPUT, step):
        if item.row.name == "labels":
            return all_of(item.base)
    return None


def _finding(context: Context, row: TensorRow, axis: str, number: int, left: float) -> Finding:
    due, made = row.worst_values or (math.nan, math.nan)
    return Finding(
        component="loss",
        cause=MISSING_REDUCTION,
        tensor=row.name,
        axes=context.mesh.named([axis]),
        evidence={
            "eps_before": row.eps,
            "eps_after": left / torch.finfo(torch.float64).eps,
            "share_beyond_2e-3": None,
            "reference": due,
            "parallel": made,
            "part": number,
            "step": row.step,
        },
        fix=f"loss is {made:.17g} in the parallel run and {due:.17g} in the reference. The logits "
        f"are right, and it is the loss of a softmax over part {number} of the vocabulary alone: "
        f"sum the exponentials over {axis} (after their maximum) before the logarithm.",
    )
