"""The gated feed-forward block that both model families use.

Ref:
    Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, on each token alone."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden_size]`` to the same shape."""
        out: Tensor = self.down(self.activate(self.gate(x), self.up(x)))
        return out

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate what goes up, element by element."""
        return F.silu(gate) * up
