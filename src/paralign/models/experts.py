"""A stack of gated feed-forward experts, each applied to the tokens that chose it.

::

    tokens [T, D] -> rows [R, D], sorted by expert -> gate, up, down -> weighted sum by token

No token is dropped: an expert takes as many rows as chose it.

Ref:
    Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts
    Layer", 2017. https://arxiv.org/abs/1701.06538
    Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022.
    https://arxiv.org/abs/2211.15841
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paralign.contiguous import in_shape_of
from paralign.models.blocked_experts import Stack, blocked_experts, pays
from paralign.models.grouped_linear import grouped_linear

NOT_HERE = -1
"""An index that stands for no expert: the choice is computed elsewhere."""


class Experts(nn.Module):
    """Expert e computes ``down[e](silu(gate[e](x)) * up[e](x))``.

    The number of experts is read from the parameters, so that a module that holds some of the
    experts works alike.

    Args:
        num_experts: Experts in the stack.
        hidden_size: Width of a token.
        expert_hidden_size: Width inside an expert.
        bias: Biases on all three layers of every expert.
    """

    def __init__(
        self, num_experts: int, hidden_size: int, expert_hidden_size: int, *, bias: bool
    ) -> None:
        super().__init__()
        shape = (num_experts, expert_hidden_size, hidden_size)
        self.gate = nn.Parameter(torch.empty(shape))
        self.up = nn.Parameter(torch.empty(shape))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, expert_hidden_size))
        inner, outer = (num_experts, expert_hidden_size), (num_experts, hidden_size)
        self.gate_bias = nn.Parameter(torch.zeros(inner)) if bias else None
        self.up_bias = nn.Parameter(torch.zeros(inner)) if bias else None
        self.down_bias = nn.Parameter(torch.zeros(outer)) if bias else None
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Sum the outputs of every token's experts, each times its weight.

        Shapes (tokens in any number of dims, none of them as well; D width, K choices):
            x: ``[..., D]``.
            indices: ``[..., K]`` int64; ``NOT_HERE`` marks a choice that adds nothing.
            weights: ``[..., K]``.
            returns: ``[..., D]`` in the dtype of ``x``.
        """
        if x.is_meta:
            return torch.empty_like(x)  # how many rows an expert gets depends on values
        tokens, indices, weights = (t.flatten(0, -2) for t in (x, indices, weights))
        return in_shape_of(x, self._sum(tokens, indices, weights))

    def _sum(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        num_experts = self.gate.shape[0]
        flat = indices.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat - NOT_HERE, minlength=num_experts - NOT_HERE).tolist()
        order = order[counts[0] :]  # NOT_HERE sorts first
        token, share = order // indices.shape[1], weights.flatten().index_select(0, order)
        # In the dtype of the weights, so that few are many's sum exactly once rounded.
        if pays(x, len(order), self.gate.shape[1]):
            total = blocked_experts(
                x, token, share, counts[1:], self._stack(), self.permute, self.activate
            )
        else:
            weighted = self._rows(self.permute(x, token), counts[1:]) * share.unsqueeze(-1)
            total = weighted.new_zeros(x.shape).index_add(0, token, weighted)
        return total.to(x.dtype)

    def permute(self, x: Tensor, token: Tensor) -> Tensor:
        """Take the row ``[R, D]`` of every choice from tokens ``[T, D]``; large and cheap."""
        return x.index_select(0, token)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Combine what two layers made of the rows; large and cheap."""
        return F.silu(gate) * up

    def _stack(self) -> Stack:
        return Stack(self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)

    def _rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        gate = grouped_linear(rows, self.gate, self.gate_bias, counts)
        up = grouped_linear(rows, self.up, self.up_bias, counts)
        return grouped_linear(self.activate(gate, up), self.down, self.down_bias, counts)
