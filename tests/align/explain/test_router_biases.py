"""What the moves of biases say of the tokens that they were moved by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align.explain.labels import IGNORED
from paralign.align.explain.router_biases import Moves, _moved_by, _moves, _proof
from paralign.align.trace import Kind
from tests.align.explain.test_context import mesh_of
from tests.align.explain.test_expert_parts import held, output

CONTEXT: Any = SimpleNamespace(mesh=mesh_of(pp=1, dp_shard=2, tp=2, ep=2))
# Choices of four experts by the tokens of four ranks; padding chose the last expert, very often.
COUNTS = {
    0: torch.tensor([5, 1, 1, 1]),
    1: torch.tensor([4, 1, 2, 1]),
    2: torch.tensor([0, 9, 1, 2]),
    3: torch.tensor([0, 1, 3, 4]),
}
TOTAL = torch.stack(list(COUNTS.values())).sum(0)  # 9, 12, 7, 8; an even share is 9
ALL = TOTAL + torch.tensor([0, 0, 0, 40])


def moves(made: dict[int, Tensor]) -> Moves:
    return Moves(_moved_by(TOTAL), made, COUNTS, ALL)


def group(*ranks: int) -> Tensor:
    return _moved_by(torch.stack([COUNTS[rank] for rank in ranks]).sum(0))


def test_a_bias_moves_against_the_load():
    assert _moved_by(TOTAL).tolist() == [0.0, -1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("made", "cause", "axes"),
    [
        ({r: torch.zeros(4) for r in range(4)}, "stale", ()),
        ({r: 3 * _moved_by(TOTAL) for r in range(4)}, "constant_factor", ()),
        ({r: _moved_by(ALL) for r in range(4)}, "token_weighting", ()),
        (
            {0: group(0, 1), 1: group(0, 1), 2: group(2, 3), 3: group(2, 3)},
            "missing_reduction",
            ("dp_shard",),
        ),
        (
            {0: group(0, 2), 1: group(1, 3), 2: group(0, 2), 3: group(1, 3)},
            "missing_reduction",
            ("tp",),
        ),
        ({r: group(r) for r in range(4)}, "missing_reduction", ("dp_shard", "tp")),
    ],
)
def test_what_was_counted_is_found(made, cause, axes):
    proof = _proof(CONTEXT, moves(made))
    assert proof is not None
    assert (proof.cause, proof.axes) == (cause, axes)


def test_moves_that_no_count_gives_are_not_explained():
    made = {r: torch.tensor([1.0, 1.0, -1.0, 0.5]) for r in range(4)}
    assert _proof(CONTEXT, moves(made)) is None


# Two experts for each of eight tokens, the last three of them padding.
CHOSEN = torch.tensor([[[0, 1], [0, 1], [0, 2], [1, 3]], [[0, 2], [2, 3], [2, 3], [3, 2]]])
LABELS = torch.tensor([[4, 5, 6, 7], [8, IGNORED, IGNORED, IGNORED]])
DUE = torch.tensor([-1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
START = torch.ones(4, dtype=torch.float64)


def side(moves: Tensor) -> Any:
    """A run whose biases begin at one and move by these."""

    def quantity(moment: Any, _: str) -> Any:
        found = held(START + 1e-3 * moves if moment.kind == Kind.PARAM_AFTER else START)
        found.problems, found.pieces = [], [found]
        return found

    return SimpleNamespace(quantity=quantity)


def test_counts_are_made_from_the_choices_of_predicted_tokens_and_of_all():
    context: Any = SimpleNamespace(
        reference=side(DUE),
        parallel=side(-3 * DUE),
        judged=lambda kind, step: [output("labels", LABELS, LABELS)],
    )
    item: Any = SimpleNamespace(
        row=SimpleNamespace(name="ffn.router.bias"), moment=SimpleNamespace(step=0)
    )
    found = _moves(context, item, output("ffn.router[0]", CHOSEN, CHOSEN))
    assert found is not None
    # One amount of 1e-3 beside a bias of 1: rounding is 1e3 eps of the amount.
    torch.testing.assert_close(found.due, DUE, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.made[0], -3 * DUE, atol=1e-12, rtol=0)
    assert found.counts[0].tolist() == [4, 3, 2, 1]
    assert found.all_counts.tolist() == [4, 3, 5, 4]
