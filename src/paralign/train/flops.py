"""Counts the floating-point operations of a training step: what the model needs, on any mesh.

A multiplication and an addition are two operations. For each token, a weight costs two in the
forward pass, two for the gradient of its input and two for its own gradient, which a frozen one
does not have; a weight of an expert costs that for the tokens that are sent to it. A query and a
key that it attends to cost ``2 * (D + D_v)`` a head in the forward pass (scores, and the weighted
sum of values) and twice that in the backward pass::

    operations = tokens * (6 * active + 4 * frozen) + pairs * 6 * sum over heads of (D + D_v)

What is looked up (an embedding, unless it is the head as well) costs nothing. Attention is causal:
``pairs`` are ``n (n + 1) / 2`` for each row or, where attention stays inside of documents, for each
document. What is computed again in the backward pass is not counted, nor what a kernel computes and
throws away.

Ref:
    Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1.
    https://arxiv.org/abs/2001.08361
    Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    https://arxiv.org/abs/2204.02311
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.documents import document_starts
from paralign.parallel.context_cores import CoreWatch
from paralign.parallel.stage import boundary_tensors
from paralign.planning import all_experts

TRAINED, FROZEN = 6, 4  # operations of a weight for one token


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """What training a model costs; see the formula above.

    Attributes:
        active_parameters: Parameters that a token passes, an embedding as well.
        has_experts: Whether a token passes only some of them.
        per_token: Operations of all weights for one token.
        per_pair: Operations of all attention heads for one query and one key.
    """

    active_parameters: int
    has_experts: bool
    per_token: int
    per_pair: int

    def of(self, *, num_tokens: int, num_pairs: int) -> int:
        """Return the operations of forward and backward pass."""
        return self.per_token * num_tokens + self.per_pair * num_pairs


def count_flops(model: nn.Module, blueprint: Blueprint, *, seq_len: int) -> ModelFlops:
    """Count what a model costs, from its parameters and one forward pass on the meta device.

    Attention counts where the blueprint names its core.

    Args:
        model: The whole model on the meta device, not parallelised.
        blueprint: How it is cut.
        seq_len: Tokens of a row.
    """
    stacks = all_experts(model, blueprint)
    choices: dict[str, int] = {}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(_note_choices, choices, name))
        for name in stacks
    ]
    layers = list(model.get_submodule(blueprint.layers_name).children())
    cores = CoreWatch(layers, blueprint)
    whole = [range(len(layers))]
    boundary_tensors(model, blueprint, splits=whole, rows=1, local_seq=seq_len)
    cores.remove()
    for hook in hooks:
        hook.remove()
    looked_up = _looked_up(model)
    active = per_token = 0
    for name, parameter in model.named_parameters():  # a tied one once
        size = parameter.numel()
        stack = next((one for one in choices if name.startswith(f"{one}.")), None)
        if stack is not None:
            size = size * choices[stack] // parameter.shape[0]
        active += size
        if id(parameter) not in looked_up:
            per_token += size * (TRAINED if parameter.requires_grad else FROZEN)
    return ModelFlops(
        active_parameters=active,
        has_experts=bool(stacks),
        per_token=per_token,
        per_pair=6 * sum(c.num_heads * (c.score_width + c.value_width) for c in cores.calls),
    )


def attended_pairs(global_batch: Mapping[str, Tensor]) -> int:
    """Return how many keys all queries of a global batch attend to, on one device and head.

    Shapes:
        global_batch: ``tokens`` ``[B, S]``; maybe ``documents``, likewise.
    """
    rows, seq_len = global_batch["tokens"].shape
    documents = global_batch.get("documents")
    if documents is None:
        return rows * seq_len * (seq_len + 1) // 2
    places = torch.arange(1, seq_len + 1, device=documents.device)
    return int((places - document_starts(documents)).sum())


def _note_choices(
    choices: dict[str, int], name: str, stack: nn.Module, args: tuple[Any, ...]
) -> None:
    """Note how many experts a token is sent to: they are given ``x, indices, weights``."""
    choices[name] = args[1].shape[-1]


def _looked_up(model: nn.Module) -> set[int]:
    """Return the parameters that only embeddings use."""
    inside: set[int] = set()
    outside: set[int] = set()
    for module in model.modules():
        kind = inside if isinstance(module, nn.Embedding) else outside
        kind |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return inside - outside
