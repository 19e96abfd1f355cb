"""The feed-forward of a layer with experts: router, experts and the expert that all tokens pass."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from paralign.loss import Predicted
from paralign.models.experts import Experts
from paralign.models.feed_forward import SwiGLU
from paralign.models.moe_sizes import MoeSizes
from paralign.models.router import Router


class MoE(nn.Module):
    """Routed experts, plus a shared one where there is one.

    Args:
        hidden_size: Width of a token.
        sizes: Experts and routing.
        bias: Biases on every layer of every expert; a router has none.
    """

    def __init__(self, hidden_size: int, sizes: MoeSizes, *, bias: bool) -> None:
        super().__init__()
        self.router = Router(hidden_size, sizes)
        self.experts = Experts(sizes.num_experts, hidden_size, sizes.expert_hidden_size, bias=bias)
        shared = sizes.shared_hidden_size
        self.shared = SwiGLU(hidden_size, shared, bias=bias) if shared else None

    def forward(self, x: Tensor, predicted: Predicted | None = None) -> Tensor:
        """Map ``[B, S, hidden_size]`` to the same shape; see :class:`Router`."""
        indices, weights = self.router(x, predicted)
        out: Tensor = self.experts(x, indices, weights)
        return out if self.shared is None else out + self.shared(x)


def feed_forward(module: nn.Module, x: Tensor, predicted: Predicted | None) -> Tensor:
    """Run a layer's feed-forward, which may have experts or not."""
    out = module(x, predicted) if isinstance(module, MoE) else module(x)
    return cast(Tensor, out)
