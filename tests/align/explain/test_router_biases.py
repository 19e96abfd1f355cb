"""What the moves of biases say of the tokens that they were moved by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align.explain.router_biases import Moves, _moved_by, _proof
from tests.align.explain.test_context import mesh_of

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
