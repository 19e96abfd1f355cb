"""How far from the reference a correct parallel run may be: every tolerance, each with its reason.

A tolerance is relative (Frobenius norm of the error over that of the base) unless its row says
otherwise; "eps" is the machine epsilon of the run's compute dtype. docs/budget.md derives the rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

EPS = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}


@dataclass(frozen=True)
class Row:
    """One named tolerance."""

    name: str
    value: float
    reason: str


class Yardstick(str, Enum):
    """What the budget rests on."""

    FP64 = "fp64"  # the reference itself, at fixed multiples of eps
    TRUTH = "truth"  # the reference's own distance from an fp64 run of the same weights and data
    NOISE = "noise"  # the reference's distance from a second, perturbed or re-ordered run of it
    UNCALIBRATED = "uncalibrated"  # a measured table; the run at hand was not measured

    __str__ = str.__str__


FP64_TENSOR = Row(
    "fp64 tensor, in eps",
    100.0,
    "Correct runs reach 3 to 6 eps: the same sums in another order. A wrong factor, summand or "
    "layer is off by 1e13 eps. 100 leaves room for deeper models.",
)
FP64_LOSS = Row(
    "fp64 loss",
    1e-14,
    "One mean over all tokens: 2e-16 was measured; the order of a sum of n numbers of one sign "
    "costs less than log2(n) eps.",
)
FP64_AFTER_STEP = Row(
    "fp64 after an optimizer step",
    1e-12,
    "Adam divides by the root of its second moment, which raises the error of elements with small "
    "gradients. 5 eps were measured after 20 steps; 1e-12 is 4500 eps.",
)
UPDATE_ROUNDING = Row(
    "rounding of a stored parameter, in eps of the parameter",
    4.0,
    "An update is a difference of two stored parameters, so their rounding (half an eps each, on "
    "both sides) is part of it, however small the update is.",
)
TRUTH_FACTOR = Row(
    "multiple of the reference's own error",
    3.0,
    "Both runs round the same sums in different orders, so their distances from the truth are "
    "alike. The larger of the tensor's own and the median of its kind is taken: one tensor's may "
    "be small by luck.",
)
TRUTH_FLOOR = Row(
    "floor, in eps",
    2.0,
    "Storing a value and adding one rank's share cost up to an eps each, also where the reference "
    "happens to be exact.",
)
SQUARE_FACTOR = Row(
    "second moment of the first step, as a multiple of its gradient's budget",
    2.0,
    "It is a square, so it is off by twice what its gradient is off by. A reference whose own "
    "square is near the truth by luck would else refuse what it accepts of the gradient.",
)
TRUTH_AFTER_FACTOR = Row(
    "multiple of the reference's largest error of a kind, after an optimizer step",
    10.0,
    "The error of an Adam update is carried by its few elements with the smallest gradients (noise "
    "over gradient, a heavy tail), so a single tensor's distance is no measure, and the largest of "
    "a kind is.",
)
TRUTH_SCALAR_FLOOR = Row(
    "floor of loss and norm, in eps",
    8.0,
    "A single number can agree with the truth by luck, so its own distance says little.",
)
UNCALIBRATED_EPS = {
    "float32": Row(
        "float32, uncalibrated, in eps",
        20.0,
        "4 times the worst tensor of correct small decoders (1.8 to 4.9 eps).",
    ),
    "float16": Row("float16, uncalibrated, in eps", 20.0, "Not measured: as float32."),
    "bfloat16": Row(
        "bfloat16, uncalibrated, in eps",
        8.0,
        "4 times the worst tensor of correct small decoders (0.6 to 2.1 eps).",
    ),
}
FLIPS_SPREAD = Row(
    "router choices that fall otherwise, in standard deviations of their number",
    4.0,
    "Near ties fall either way, independently of each other: their number has the square root of "
    "its mean as standard deviation.",
)
FLIPS_FLOOR = Row(
    "router choices that fall otherwise, at least",
    2.0,
    "Where one or none is expected, a second near tie is no fault.",
)
ZERO_IN_THEORY = Row(
    "zero in theory, in eps of the global gradient norm",
    1.0,
    "A gradient below one eps of the global norm is rounding noise of larger numbers that cancel; "
    "its relative error is of order 1 in a correct run, and its absolute error stays below this.",
)


@dataclass(frozen=True)
class Budget:
    """The tolerances of one comparison.

    Args:
        dtype: Compute dtype of the run.
        yardstick: What the tolerances rest on.
    """

    dtype: str
    yardstick: Yardstick

    @property
    def eps(self) -> float:
        """Machine epsilon of the compute dtype."""
        return EPS[self.dtype]

    def tensor(
        self,
        *,
        after_step: bool,
        own: float | None = None,
        others: Sequence[float] = (),
    ) -> float | None:
        """Return the relative budget of an ordinary tensor; None: it is listed, not gated.

        Args:
            after_step: It depends on an optimizer step: a parameter or update after it, or anything
                of a later step.
            own: The reference's distance from the truth, for this tensor.
            others: The same for all ordinary tensors of its kind and step.
        """
        if self.yardstick is Yardstick.FP64:
            return FP64_AFTER_STEP.value if after_step else FP64_TENSOR.value * self.eps
        if self.yardstick is Yardstick.UNCALIBRATED:
            return None if after_step else UNCALIBRATED_EPS[self.dtype].value * self.eps
        assert own is not None, "with a truth the reference's own distance is known"
        floor = TRUTH_FLOOR.value * self.eps
        if after_step:
            return TRUTH_AFTER_FACTOR.value * max([own, *others]) + floor
        return TRUTH_FACTOR.value * max(own, statistics.median([own, *others])) + floor

    def scalar(self, kind: str, *, after_step: bool, own: float | None = None) -> float:
        """Return the relative budget of a loss or norm."""
        if self.yardstick is Yardstick.FP64:
            if after_step:
                return FP64_AFTER_STEP.value
            return FP64_LOSS.value if kind == "loss" else FP64_TENSOR.value * self.eps
        if self.yardstick is Yardstick.UNCALIBRATED:
            multiple = TRUTH_AFTER_FACTOR.value if after_step else 1.0
            return UNCALIBRATED_EPS[self.dtype].value * self.eps * multiple
        assert own is not None, "with a truth the reference's own distance is known"
        factor = (TRUTH_AFTER_FACTOR if after_step else TRUTH_FACTOR).value
        return factor * (own + TRUTH_SCALAR_FLOOR.value / TRUTH_FACTOR.value * self.eps)

    def flips(self, expected: float) -> float:
        """Return how many choices of routers may differ from the reference's.

        Args:
            expected: How many choices of the truth differ from the reference's.
        """
        if self.yardstick is Yardstick.FP64:
            return 0.0
        mean = TRUTH_FACTOR.value * expected
        return mean + FLIPS_SPREAD.value * math.sqrt(mean) + FLIPS_FLOOR.value

    def update_rounding(self, parameter_norm: float, update_norm: float, eps: float) -> float:
        """Return what the rounding of stored parameters may add to an update's relative error.

        Args:
            parameter_norm: Norm of the parameter after the step.
            update_norm: Norm of the update.
            eps: Machine epsilon of the dtype the parameter is stored in.
        """
        return (
            UPDATE_ROUNDING.value * eps * parameter_norm / update_norm if update_norm > 0 else 0.0
        )

    def zero_in_theory(self, global_norm: float) -> float:
        """Return the gradient norm below which a tensor's gradient counts as zero in theory."""
        return ZERO_IN_THEORY.value * self.eps * global_norm
