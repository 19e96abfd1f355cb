"""Count forwards, to notice a ``step()`` that runs the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ForwardCount:
    """How often one of some modules has been called with gradients.

    Args:
        modules: The model, or the pipeline stages of this rank.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._handles: list[Any] = []
        self.count = 0

    def start(self) -> None:
        """Begin to count."""
        self._handles = [m.register_forward_pre_hook(self._called) for m in self._modules]

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _called(self, module: nn.Module, args: Any) -> None:
        self.count += torch.is_grad_enabled()
