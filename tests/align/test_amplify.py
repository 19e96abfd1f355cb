from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from paralign.align.trace import Kind
from tests.align.judging import judge, row
from tests.align.synthetic import toy_step

NAME = "layers.0.w"
LR = 1e-3


def adam_step(grad: Tensor, *, lr: float = LR) -> dict[tuple[str, str], Tensor]:
    """Return the toy step with ``grad`` and what the first Adam step makes of it."""
    step = dict(toy_step())
    before = step[Kind.PARAM, NAME]
    step[Kind.GRAD, NAME] = grad
    step[Kind.PARAM_AFTER, NAME] = before - lr * grad / (grad.abs() + 1e-8)
    return step


def gradient(small: float) -> Tensor:
    """Return a gradient of ordinary size with one small element."""
    grad = 1e-3 * torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double()
    grad[1, 2] = small
    return grad


def shaken(grad: Tensor) -> Tensor:
    """Add the rounding of a sum as large as the gradient's own elements."""
    generator = torch.Generator().manual_seed(1)
    noise = 2e-15 * torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
    return grad + noise * grad.square().mean().sqrt()


def test_rounding_of_a_small_gradient_that_adam_enlarged_is_within_budget(tmp_path: Path) -> None:
    grad = gradient(1e-8)
    report = judge(tmp_path, [adam_step(shaken(grad))], [adam_step(grad)])
    assert row(report, "update", NAME).rel_l2 > 1e-12  # beyond the budget of most updates
    assert report.verdict == "aligned"


def test_more_than_the_gradients_budget_explains_is_not(tmp_path: Path) -> None:
    grad = gradient(1e-8)
    other = adam_step(shaken(grad))
    other[Kind.PARAM_AFTER, NAME][1, 2] += 1e-7 * LR
    report = judge(tmp_path, [other], [adam_step(grad)])
    assert not row(report, "update", NAME).ok
    assert report.verdict == "misaligned"


def test_a_small_gradient_does_not_excuse_the_other_elements(tmp_path: Path) -> None:
    grad = gradient(1e-8)
    report = judge(tmp_path, [adam_step(shaken(grad), lr=LR * (1 + 1e-8))], [adam_step(grad)])
    assert not row(report, "update", NAME).ok


def test_a_gradient_of_zero_has_no_noise(tmp_path: Path) -> None:
    grad = gradient(0.0)
    other = adam_step(grad)
    other[Kind.PARAM_AFTER, NAME][1, 2] += 1e-3 * LR
    report = judge(tmp_path, [other], [adam_step(grad)])
    assert not row(report, "update", NAME).ok
