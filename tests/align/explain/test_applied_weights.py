"""Experts' output made again, with other weights or other experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paralign.align.explain.applied_weights import prove_applied_weights
from paralign.align.explain.proof import Proof
from paralign.align.trace import Kind
from tests.align.explain.test_expert_parts import held

EXPERTS, WIDTH, INNER, CHOSEN = 6, 8, 5, 3
ROWS, LENGTH = 2, 7


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TOKENS = draw(ROWS, LENGTH, WIDTH, seed=0)
CHOICES = draw(ROWS, LENGTH, EXPERTS, seed=1).topk(CHOSEN).indices
WEIGHTS = draw(ROWS, LENGTH, CHOSEN, seed=2).softmax(-1)
STACK = {
    "gate": draw(EXPERTS, INNER, WIDTH, seed=3),
    "up": draw(EXPERTS, INNER, WIDTH, seed=4),
    "down": draw(EXPERTS, WIDTH, INNER, seed=5),
    "gate_bias": draw(EXPERTS, INNER, seed=6),
    "down_bias": draw(EXPERTS, WIDTH, seed=7),
}


def experts(choices: Tensor, weights: Tensor) -> Tensor:
    """Go token by token, as no layer does."""
    made = torch.zeros_like(TOKENS)
    for row, position in torch.cartesian_prod(torch.arange(ROWS), torch.arange(LENGTH)).tolist():
        x = TOKENS[row, position]
        for expert, weight in zip(choices[row, position], weights[row, position], strict=True):
            gate = F.silu(STACK["gate"][expert] @ x + STACK["gate_bias"][expert])
            inner = gate * (STACK["up"][expert] @ x)
            out = STACK["down"][expert] @ inner + STACK["down_bias"][expert]
            made[row, position] += weight * out
    return made


def prove(made: Tensor, due: Tensor, *, tokens_ok: bool = True) -> Proof | None:
    """Ask about experts of which each of three ranks of ep has two, all outputs on one rank."""

    def output(name: str, due: Tensor, made: Tensor, *, ok: bool = True) -> Any:
        base = SimpleNamespace(
            base=float(due.double().norm()), relative=float((made - due).double().norm())
        )
        return SimpleNamespace(
            row=SimpleNamespace(name=name, ok=ok),
            moment=SimpleNamespace(step=0),
            tolerance=1e-13,
            measured=SimpleNamespace(total=base),
            base=held(due),
            side=SimpleNamespace(replicas={0: [held(made)]}),
        )

    item = output("ffn.experts", due, made, ok=False)
    choices, weights = output("ffn.router[0]", CHOICES, CHOICES), output("", WEIGHTS, WEIGHTS)
    outputs = [
        output("a", TOKENS.flip(1), TOKENS.flip(1)),
        output("norm", TOKENS, TOKENS, ok=tokens_ok),
        output("b", TOKENS * 2, TOKENS * 2),
        item,
    ]

    def quantity(moment: Any, name: str) -> Any:
        leaf = name.removeprefix("ffn.experts.")
        held_ = held(STACK[leaf]) if leaf in STACK and moment.kind == Kind.PARAM else None
        if held_ is not None:
            held_.problems = []
        return held_

    def rank(number: int) -> Any:
        span = SimpleNamespace(local=(0, 2), global_=(2 * number, 2 * number + 2))
        entry = SimpleNamespace(
            kind=Kind.PARAM,
            name="ffn.experts.gate",
            shape=tuple(STACK["gate"].shape),
            map=((span,), (), ()),
        )
        return SimpleNamespace(rank=number, tensors=[entry], coordinates={"ep": number})

    context: Any = SimpleNamespace(
        judged=lambda kind, step: outputs,
        reference=SimpleNamespace(quantity=quantity),
        trace=SimpleNamespace(ranks=[rank(number) for number in range(3)]),
    )
    return prove_applied_weights(context, item, choices, weights)


@pytest.mark.parametrize(
    ("choices", "weights", "cause", "axes", "told"),
    [
        (CHOICES, WEIGHTS.square(), "different_config", (), "applied twice"),
        ((CHOICES + 4) % EXPERTS, WEIGHTS, "permuted_shards", ("ep",), "4 further on"),
        (CHOICES, WEIGHTS.sqrt(), "different_config", (), "times the router's weights"),
    ],
)
def test_what_was_applied_is_proven(choices, weights, cause, axes, told):
    proof = prove(experts(choices, weights), experts(CHOICES, WEIGHTS))
    assert proof is not None
    assert (proof.cause, proof.axes) == (cause, axes)
    assert told in proof.text
    assert proof.left < 1e-13
    assert proof.candidates == ()


def test_other_choices_without_an_order_are_not_explained():
    other = CHOICES.clone()
    other[0, 0] = (CHOICES[0, 0] + 1) % EXPERTS
    assert prove(experts(other, WEIGHTS), experts(CHOICES, WEIGHTS)) is None


def test_experts_that_compute_something_else_are_not_explained():
    due = experts(CHOICES, WEIGHTS) + 0.1
    assert prove(experts(CHOICES, WEIGHTS.square()) + 0.1, due) is None


def test_tokens_that_are_off_themselves_explain_nothing():
    made, due = experts(CHOICES, WEIGHTS.square()), experts(CHOICES, WEIGHTS)
    assert prove(made, due, tokens_ok=False) is None
