"""A loss whose softmax is over one rank's part of the vocabulary."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align.explain.own_vocabulary import explain_own_vocabulary
from paralign.align.trace import Kind
from tests.align.explain.test_context import mesh_of
from tests.align.explain.test_expert_parts import output

BALANCE = 0.25  # what experts add to the loss


def scene(
    made: float, *, tp: int = 2, ok: bool = True, width: int = 12
) -> tuple[Any, Any, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    labels = torch.randint(12, (2, 5), generator=generator)
    labels[1, 3:] = -100
    items = {
        Kind.OUTPUT: [
            output("norm", logits, logits, ok=True),
            output("head", logits[..., :width], logits[..., :width], ok=ok),
        ],
        Kind.INPUT: [output("labels", labels, labels, ok=True)],
    }
    context: Any = SimpleNamespace(
        mesh=mesh_of(pp=1, dp_shard=2, tp=tp, ep=1),
        budget=SimpleNamespace(eps=torch.finfo(torch.float64).eps),
        judged=lambda kind, step: items[kind],
    )
    due = loss(logits, labels) + BALANCE
    row: Any = SimpleNamespace(name="loss", eps=1e9, step=0, worst_values=(due, made))
    return context, row, logits, labels


def loss(words: Tensor, labels: Tensor, whole: Tensor | None = None) -> float:
    valid = labels != -100
    index = labels.clamp(min=0).unsqueeze(-1)
    of_labels = (words if whole is None else whole).gather(-1, index).squeeze(-1)
    return float((words.logsumexp(-1) - of_labels)[valid].mean())


@pytest.mark.parametrize("part", [0, 1])
def test_the_part_is_found(part):
    _, _, logits, labels = scene(0.0)
    made = loss(logits.chunk(2, -1)[part], labels, logits) + BALANCE
    context, row, *_ = scene(made)
    finding = explain_own_vocabulary(context, 0, row)
    assert finding is not None
    assert (finding.component, finding.cause, finding.axes) == ("loss", "missing_reduction", ["tp"])
    assert finding.evidence["part"] == part


def test_another_loss_and_logits_that_are_wrong_are_not_explained():
    _, _, logits, labels = scene(0.0)
    made = loss(logits.chunk(2, -1)[0], labels, logits) + BALANCE
    context, row, *_ = scene(made * (1 + 1e-6))
    assert explain_own_vocabulary(context, 0, row) is None
    context, row, *_ = scene(made, ok=False)
    assert explain_own_vocabulary(context, 0, row) is None
    context, row, *_ = scene(made, tp=1)
    assert explain_own_vocabulary(context, 0, row) is None
    context, row, *_ = scene(made, width=6)  # no logits: labels are no features of it
    assert explain_own_vocabulary(context, 0, row) is None
