"""Places in a training step where a fault may reach in; empty in an honest run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class Hooks:
    """What is called at which moment of a step, in the order of registration."""

    on_batch: list[Callable[[Any], Any]] = field(default_factory=list)
    after_backward: list[Callable[[], object]] = field(default_factory=list)
    before_step: list[Callable[[torch.optim.Optimizer], object]] = field(default_factory=list)
    after_step: list[Callable[[torch.optim.Optimizer], object]] = field(default_factory=list)

    def change_batch(self, batch: T) -> T:
        """Return the batch that the step is to see."""
        for change in self.on_batch:
            changed = change(batch)
            batch = batch if changed is None else changed
        return batch

    def backward_done(self) -> None:
        """Gradients are final; they have been neither recorded nor clipped."""
        for call in self.after_backward:
            call()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are clipped; ``optimizer.step()`` is next."""
        for call in self.before_step:
            call(optimizer)

    def step_done(self, optimizer: torch.optim.Optimizer) -> None:
        """The parameters have moved and gradients are cleared; the next forward is next."""
        for call in self.after_step:
            call(optimizer)
