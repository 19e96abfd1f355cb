from __future__ import annotations

import torch
from torch import nn

from paralign.parallel.gradients import give_back, take_gradients


def parameter(grad: float | None) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(2))
    made.grad = None if grad is None else torch.full((2,), grad)
    return made


def test_gradients_are_set_aside_and_added_to_what_has_come_since():
    has, has_none = parameter(1.0), parameter(None)
    taken = take_gradients([has, has_none])
    assert has.grad is None
    has.grad = torch.full((2,), 10.0)
    has_none.grad = torch.full((2,), 5.0)
    give_back(taken)
    assert has.grad.tolist() == [11.0, 11.0]
    assert has_none.grad.tolist() == [5.0, 5.0]


def test_gradients_return_unchanged_where_none_has_come():
    has = parameter(1.0)
    before = has.grad
    give_back(take_gradients([has]))
    assert has.grad is before


def test_nothing_taken_is_nothing_given_back():
    has_none = parameter(None)
    give_back(take_gradients([has_none]))
    assert has_none.grad is None
