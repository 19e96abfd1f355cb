"""What tokens' choices say of an experts' output that is off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align.explain.expert_parts import (
    Tokens,
    _lost_experts,
    _met_others,
    _no_room,
    _not_combined,
    prove_other_weights,
)
from paralign.layout import Box, whole

CHOICES = torch.tensor([[0, 1], [0, 3], [2, 3], [1, 0], [3, 0], [2, 1]])
OWN = {0: (0, 2), 1: (2, 4)}  # experts of two ranks


def tokens(is_off: Tensor, *, rank: int = 0, is_zero: Tensor | None = None) -> list[Tokens]:
    zero = torch.zeros(len(CHOICES), dtype=torch.bool) if is_zero is None else is_zero
    return [Tokens(rank, CHOICES, is_off, zero)]


def test_what_is_off_where_a_choice_is_elsewhere_was_not_combined():
    is_elsewhere = CHOICES >= 2
    off, zero = is_elsewhere.any(-1), is_elsewhere.all(-1)
    proof = _not_combined(tokens(off, is_zero=zero), OWN)
    assert proof is not None
    assert (proof.cause, proof.axes) == ("missing_reduction", ("ep",))
    assert _not_combined(tokens(off), OWN) is None  # something came where nothing is here
    assert _not_combined(tokens(~off, is_zero=zero), OWN) is None
    assert _not_combined(tokens(off, is_zero=zero), {}) is None  # every rank has all experts


def test_what_is_off_where_one_expert_is_chosen_lacks_that_expert():
    proof = _lost_experts(tokens((CHOICES == 1).any(-1)), OWN)
    assert proof is not None
    assert proof.detail["experts"] == [1]
    assert "forward/unknown: the expert itself" in proof.candidates[1]
    assert _lost_experts(tokens(torch.ones(len(CHOICES), dtype=torch.bool)), OWN) is None


def test_what_is_off_after_so_many_had_no_room():
    # Expert 0 is chosen by tokens 0, 1, 3 and 4; expert 3 by 1, 2 and 4; expert 1 by 0, 3 and 5.
    off = torch.tensor([False, False, False, True, True, True])
    proof = _no_room(tokens(off), OWN)
    assert proof is not None
    assert (proof.cause, proof.detail["capacity"]) == ("missing_contribution", 2)
    assert _no_room(tokens(off.flip(0)), OWN) is None


def test_tokens_that_are_all_off_and_have_something_met_others():
    everyone = torch.ones(len(CHOICES), dtype=torch.bool)
    proof = _met_others(tokens(everyone), OWN)
    assert proof is not None
    assert (proof.cause, proof.axes) == ("permuted_shards", ("ep",))
    assert proof.separate_by is not None
    assert _met_others(tokens(everyone), {}) is None
    assert _met_others(tokens(everyone, is_zero=everyone), OWN) is None


def held(values: Tensor) -> Any:
    def read(box: Box) -> Tensor:
        at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        return values[at]

    return SimpleNamespace(
        rank=0, map=whole(values.shape), shape=values.shape, read=read, fetch=read
    )


def output(name: str, due: Tensor, made: Tensor, *, ok: bool = False) -> Any:
    return SimpleNamespace(
        row=SimpleNamespace(name=name, ok=ok),
        moment=SimpleNamespace(step=0),
        base=held(due),
        side=SimpleNamespace(replicas={0: [held(made)]}),
    )


@pytest.mark.parametrize(
    ("name", "right_choices", "divided_by", "is_proven"),
    [
        ("ffn.router[1]", True, 0.8, True),
        ("ffn.router[1]", False, 0.8, False),  # other experts have other weights
        ("ffn.experts", True, 0.8, False),
        ("ffn.router[1]", True, 1.0, False),  # they add up to one here too, and differ otherwise
    ],
)
def test_weights_that_add_up_in_the_reference_alone(name, right_choices, divided_by, is_proven):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(2, 5, 3, generator=generator, dtype=torch.float64)
    due = scores / scores.sum(-1, keepdim=True)
    made = scores / scores.sum(-1, keepdim=True) ** divided_by
    item = output(name, due, made.roll(1, -1))
    choices = output("ffn.router[0]", due, due, ok=right_choices)
    context: Any = SimpleNamespace(judged=lambda kind, step: [choices, item])
    proof = prove_other_weights(context, item)
    assert (proof is not None) is is_proven
    if proof is not None:
        assert (proof.cause, proof.axes) == ("different_config", ())
        assert "add up to 1 in the reference" in proof.text
