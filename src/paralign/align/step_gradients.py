"""The gradients of the step in progress: taken before clipping, and again where it changed them.

They are taken before anything uses them. A trainer's ``optimizer.step()`` may run the model itself;
what was found at its entry is then of no step, and is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paralign.align.forward_count import ForwardCount
from paralign.align.parameter_pieces import ParameterPieces
from paralign.align.trace import Kind
from paralign.align.trace_writer import TraceWriter


class StepGradients:
    """Writes the gradients of one step after the other.

    Args:
        pieces: What this rank holds.
        forwards: Counts the forwards of the modules.
        step: The number of the step in progress.
        writer: Where to write.
        optimizers: Those given or seen so far.
    """

    def __init__(
        self,
        pieces: ParameterPieces,
        forwards: ForwardCount,
        *,
        step: Callable[[], int],
        writer: Callable[[], TraceWriter],
        optimizers: Callable[[], list[Any]],
    ) -> None:
        self._pieces = pieces
        self._forwards = forwards
        self._step = step
        self._writer = writer
        self._optimizers = optimizers
        self.end_step()

    def end_step(self) -> None:
        """Begin anew: the gradients of the next step are others."""
        self._is_taken = False
        self._taken_at: int | None = None
        """How many forwards there had been when gradients were taken at the entry of a step."""
        self._norms: Sequence[Tensor | None] | None = None
        """Of the gradients as they were taken, where clipping may change them afterwards."""
        self._num_backwards = 0

    def take(self, *, at_step: bool = False) -> None:
        """Take the gradients if they were not taken in this step.

        Args:
            at_step: The optimizer is about to step, so that nothing changes them any more.
        """
        self._forget_stale()
        if self._is_taken:
            return
        if at_step and not self._pieces.have_gradients:
            return  # a trainer's step(), which computes them itself: taken at its end
        self._write(Kind.GRAD)
        self._is_taken = True
        if at_step:
            self._taken_at = self._forwards.count
        else:
            self._norms = self._pieces.norms()

    def take_last(self) -> None:
        """Take the gradients at the end of the step, if nothing has used them before."""
        self._forget_stale()
        if not self._is_taken:
            self._write(Kind.GRAD)
            self._is_taken = True

    def take_clipped(self) -> None:
        """Take the gradients again if something has changed them since they were taken."""
        before, self._norms = self._norms, None
        if before is None:
            return
        after = self._pieces.norms()
        gone = any(b is not None and a is None for b, a in zip(before, after, strict=True))
        if not gone and not _equal(before, after):
            self._write(Kind.CLIPPED_GRAD)

    def take_micro_batch(self, micro_batch: int, gradients: dict[int, Tensor]) -> None:
        """Write what a backward pass has added."""
        entries = self._pieces.micro_gradients(self._step(), micro_batch, gradients)
        self._writer().write(f"step{self._step()}.micro_grad{self._num_backwards}", entries)
        self._num_backwards += 1

    def _write(self, kind: str) -> None:
        entries = self._pieces.gradients(kind, self._step(), self._optimizers())
        if kind == Kind.CLIPPED_GRAD:
            # A rank whose parameters are all frozen has nothing that clipping could have changed.
            entries = [(entry, tensor) for entry, tensor in entries if tensor is not None]
        self._writer().write(f"step{self._step()}.{kind}", entries)

    def _forget_stale(self) -> None:
        """Forget gradients taken at the entry of a ``step()`` that then ran the model itself."""
        if self._taken_at is None or self._forwards.count == self._taken_at:
            return
        tensors = self._writer().index.tensors
        tensors[:] = [e for e in tensors if (e.kind, e.step) != (Kind.GRAD, self._step())]
        self._is_taken, self._taken_at = False, None


def _equal(before: Sequence[Tensor | None], after: Sequence[Tensor | None]) -> bool:
    """Whether two lists of norms are the same; NaN is the same as NaN."""
    pairs = list(zip(before, after, strict=True))
    if any((a is None) != (b is None) for a, b in pairs):
        return False
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not both:
        return True
    differ = [(a != b) & ~(a.isnan() & b.isnan()) for a, b in both]
    return not bool(torch.stack([d.to("cpu") for d in differ]).any())
