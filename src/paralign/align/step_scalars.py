"""The numbers of the step in progress: losses that are reported, and the gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paralign.align.placements import RankAxes, is_dtensor
from paralign.align.trace import ScalarEntry
from paralign.align.trace_writer import TraceWriter
from paralign.errors import ConfigError


class StepScalars:
    """Writes the numbers of one step after the other.

    Args:
        axes: Where this rank is; ranks along tp have the same loss.
        step: The number of the step in progress.
        writer: Where to write.
    """

    def __init__(
        self, axes: RankAxes, *, step: Callable[[], int], writer: Callable[[], TraceWriter]
    ) -> None:
        self._step = step
        self._writer = writer
        self._axes = axes
        self.end_step()

    def end_step(self) -> None:
        """Begin anew: the next step has a norm of its own."""
        self._is_norm_reported = False

    def loss(
        self, value: float | Tensor, tokens: int | Tensor | None, reduction: str, scope: str
    ) -> None:
        """Write a loss, whose arguments :func:`check_loss` has seen."""
        count = None if tokens is None else int(tokens)
        same = ("tp",) if "tp" in self._axes.groups else ()
        self._writer().scalar(
            ScalarEntry("loss", self._step(), _number(value), count, reduction, scope, same)
        )

    def norm(self, value: float | Tensor) -> None:
        """Write a norm that was reported; it counts instead of what was seen."""
        scalars = self._writer().index.scalars
        scalars[:] = [
            entry
            for entry in scalars
            if self._is_norm_reported or (entry.kind, entry.step) != ("norm", self._step())
        ]
        self._is_norm_reported = True
        scalars.append(ScalarEntry("norm", self._step(), _number(value)))

    def norm_in_use(self, value: Any) -> None:
        """Write the norm that gradients are clipped by, unless another was reported."""
        if not self._is_norm_reported:
            self._writer().scalar(ScalarEntry("norm", self._step(), _number(value)))


def check_loss(tokens: int | Tensor | None, reduction: str, scope: str) -> None:
    """Check what is said of a loss.

    Raises:
        ConfigError: A local mean without its tokens, or an unknown reduction or scope.
    """
    problems = []
    if reduction not in ("sum", "mean"):
        problems.append(f"reduction={reduction!r} must be 'sum' or 'mean'")
    if scope not in ("local", "global"):
        problems.append(f"scope={scope!r} must be 'local' or 'global'")
    if scope == "local" and reduction == "mean" and tokens is None:
        problems.append(
            "a local mean cannot be added up without its weight. Pass tokens=number of valid labels"
        )
    if problems:
        raise ConfigError.from_problems("rec.loss cannot take this", problems)


def _number(value: float | Tensor) -> float:
    whole: Any = value
    if is_dtensor(whole):
        whole = whole.full_tensor()
    return float(whole.detach() if isinstance(whole, Tensor) else whole)
