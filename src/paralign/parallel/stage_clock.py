"""How long a rank works on its pipeline stages, and how long it waits for others meanwhile.

::

    rank 0   F0 F1 F2 F3 .. .. B0 .. B1 .. B2 .. B3      ..: it waits for what rank 1 sends
             `------------------- step -------------'

Nothing waits for the device: on an accelerator, events are put into its stream and read later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

_Span = tuple[Any, Any]  # seconds, or events


class StageClock:
    """Measures the steps of a pipeline on one rank; off until it is asked to.

    Args:
        device: Where the stages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._work: list[_Span] = []
        self._steps: list[_Span] = []
        self.is_on = False

    @contextmanager
    def work(self) -> Iterator[None]:
        """Measure a piece of work on a stage."""
        with self._span(self._work):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a whole step."""
        with self._span(self._steps):
            yield

    def take(self) -> tuple[float, float]:
        """Return seconds of work and of whole steps since the last call.

        On an accelerator it waits for the last event.
        """
        if self._device.type != "cpu" and self._steps:
            self._steps[-1][1].synchronize()
        taken = self._seconds(self._work), self._seconds(self._steps)
        self._work.clear()
        self._steps.clear()
        return taken

    @contextmanager
    def _span(self, spans: list[_Span]) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        began = self._now()
        yield
        spans.append((began, self._now()))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def _seconds(self, spans: list[_Span]) -> float:
        if self._device.type == "cpu":
            return float(sum(end - begin for begin, end in spans))
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1000


class TimedStage(PipelineStage):
    """A stage whose work is measured: all that a schedule lets it compute.

    Collectives of other axes inside of it are part of the work. What is left of a step is messages
    between stages, and waiting for them.

    Args:
        arguments: As for torch's own.
        clock: What measures it.
        options: As for torch's own.
    """

    def __init__(self, *arguments: Any, clock: StageClock, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock = clock

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        """Run the forward pass of a micro-batch."""
        with self._clock.work():
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        """Run the backward pass of a micro-batch, or that of its input."""
        with self._clock.work():
            return super().backward_one_chunk(*arguments, **options)

    def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        """Run the rest of a backward pass."""
        with self._clock.work():
            return super().backward_weight_one_chunk(*arguments, **options)

    def perform_reduce_grad(self, *arguments: Any, **options: Any) -> Any:
        """Reduce gradients."""
        with self._clock.work():
            return super().perform_reduce_grad(*arguments, **options)
