"""Adam's formula and the ways it is commonly varied, computed from the recorded state.

Ref:
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    https://arxiv.org/abs/1412.6980
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    https://arxiv.org/abs/1711.05101
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.proof import Readable
from paralign.align.judge import Compared
from paralign.align.pair import Moment, Quantity
from paralign.align.trace import Kind
from paralign.layout import Box

_STEP_COUNTS = range(1, 11)
_COMMON_EPS = (1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 1e-15, 0.0)


@dataclass(frozen=True)
class Direction:
    """An AdamW update, part by part: ``-lr * (m / correction / (root + eps) + decay * p)``."""

    mean: Readable
    square: Readable
    parameter: Readable
    lr: float
    decay: float
    eps: float
    mean_correction: float
    square_correction: float
    eps_inside: bool = False

    def fetch(self, box: Box) -> Tensor:
        """Return the update at ``box``."""
        square = self.square.fetch(box) / self.square_correction
        if self.eps_inside:
            root = torch.sqrt(square + self.eps)
        else:
            root = torch.sqrt(square) + self.eps
        mean = self.mean.fetch(box) / self.mean_correction
        return (mean / root + self.parameter.fetch(box) * self.decay) * -self.lr


def direction_variants(
    context: Context, item: Compared, before: Quantity, options: Mapping[str, Any]
) -> Iterator[tuple[str, str, float, Direction]]:
    """Yield how the update could have been made, the option and its value, and the update."""
    betas, eps, rate = options.get("betas"), options.get("eps"), options.get("lr")
    step, name = item.moment.step, item.row.name
    mean = context.parallel.quantity(Moment.of(step, Kind.MOMENT, "exp_avg"), name)
    square = context.parallel.quantity(Moment.of(step, Kind.MOMENT, "exp_avg_sq"), name)
    count = _count(context, item)
    if (
        mean is None
        or square is None
        or count is None
        or mean.problems
        or square.problems
        or not isinstance(betas, list | tuple)
        or not isinstance(eps, int | float)
        or not isinstance(rate, int | float)
    ):
        return
    decay = float(options.get("weight_decay") or 0.0)
    corrections = _corrections(betas, count)

    def made(e: float, c: tuple[float, float], *, inside: bool = False) -> Direction:
        return Direction(mean, square, before, float(rate), decay, e, c[0], c[1], inside)

    for steps in [n for n in _STEP_COUNTS if n != count]:
        told = f"at step {steps} of its count, with the moments of step {count}"
        yield told, "step", float(steps), made(float(eps), _corrections(betas, steps))
    yield "with eps inside the root", "eps", float(eps), made(float(eps), corrections, inside=True)
    scaled = float(eps) / math.sqrt(corrections[1])
    yield "with eps before the bias correction", "eps", scaled, made(scaled, corrections)
    yield "without bias correction", "bias_correction", 0.0, made(float(eps), (1.0, 1.0))
    for other in _COMMON_EPS:
        if other != eps:
            told = f"with eps={other:g} instead of {eps:g}"
            yield told, "eps", other, made(other, corrections)


def _corrections(betas: Sequence[float], count: int) -> tuple[float, float]:
    return 1 - float(betas[0]) ** count, 1 - float(betas[1]) ** count


def _count(context: Context, item: Compared) -> int | None:
    """Return the number of steps that the optimizer has counted, this one included."""
    moment = Moment.of(item.moment.step, Kind.MOMENT, "step")
    quantity = context.parallel.quantity(moment, item.row.name)
    if quantity is None or quantity.problems or quantity.shape != ():
        return None
    return int(float(quantity.fetch(Box((), (), ()))))
