"""Rotary position embedding from global positions, so that a slice of a sequence is turned alike.

Ref:
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotary(NamedTuple):
    """Cosines and sines of every position and pair of features: ``[B, 1, S, D/2]`` in float64."""

    cos: Tensor
    sin: Tensor


def rotary_tables(positions: Tensor, *, head_dim: int, theta: float) -> Rotary:
    """Compute the rotation of every token.

    In float64 whatever the model's dtype: position 100,000 times a frequency in float32 is off by
    almost 0.01 radians. :func:`apply_rotary` rounds the tables to the dtype of what it turns.

    Shapes:
        positions: ``[B, S]`` int64, global; any order.
        returns: ``cos`` and ``sin``, each ``[B, 1, S, head_dim / 2]``.
    """
    exponents = (
        torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    )
    angles = positions.to(torch.float64).unsqueeze(-1) * theta**-exponents
    angles = angles.unsqueeze(1)
    return Rotary(angles.cos(), angles.sin())


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pairs (i, i + D/2) of the last dim by each token's angles.

    Shapes:
        x: ``[B, N, S, D]``.
        returns: like ``x``.
    """
    cos, sin = rotary.cos.to(x.dtype), rotary.sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def default_positions(tokens: Tensor) -> Tensor:
    """Return ``0 .. S-1`` for every row of ``tokens`` ``[B, S]``, which are whole sequences."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
