"""The optimizer of a config, and which of its parameters weight decay is for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paralign.config.training import OptimizerSection


def build_optimizer(
    section: OptimizerSection, named: Iterable[tuple[str, nn.Parameter]], *, fused: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer over parameters, or the shards of them, that this rank holds.

    Args:
        section: What to build.
        named: Parameters by global name; which group one is in depends on its name and its global
            number of dims, so no mesh can change it.
        fused: Use the engine's one-kernel form, for plain tensors or within
            :func:`paralign.train.local_shards.on_local_shards`.
    """
    chosen = list(named)
    spared = [p for n, p in chosen if section.decay == "matrices" and not is_matrix(n, p)]
    left_out = {id(parameter) for parameter in spared}
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in chosen if id(p) not in left_out]},
        {"params": spared, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=section.lr,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
            fused=fused,
        )
    return torch.optim.AdamW(
        groups,
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=fused,
    )


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix, or a stack of them: no bias, not one of a stack either."""
    return parameter.dim() >= 2 and not name.rpartition(".")[2].endswith("bias")
