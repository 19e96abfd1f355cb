"""What experts cost: tokens that travel over ep, and counts that balance them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from paralign.blueprint import Blueprint
from paralign.config.run import RunConfig
from paralign.mesh import FOLDS, Axis, Degrees
from paralign.models.router import Router, named_routers
from paralign.parallel.support import Plan
from paralign.planning import expert_stacks
from paralign.prove.traffic import Traffic, all_reduced, sent

COUNT_BYTES = 8  # of a whole number that is counted
INDEX_BYTES = 4  # of a token's choice, on its way


@dataclass(frozen=True, kw_only=True)
class _Call:
    """One call of a stack of experts, on the tokens of one rank and micro-batch."""

    layer: str
    num_tokens: int
    token_bytes: int
    top_k: int
    weights_bytes: int  # of one token


class ExpertWatch:
    """Notes every call of experts in a forward pass of ``skeleton``."""

    def __init__(self, skeleton: nn.Module, blueprint: Blueprint, layers: Sequence[str]) -> None:
        self.calls: list[_Call] = []
        self.routers = named_routers([skeleton])
        for name in expert_stacks(skeleton, blueprint, layers):
            hook = partial(self._note, name)
            skeleton.get_submodule(name).register_forward_pre_hook(hook)

    def _note(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        x, indices, weights = args
        self.calls.append(
            _Call(
                layer=name,
                num_tokens=math.prod(x.shape[:-1]),
                token_bytes=_row_bytes(x),
                top_k=indices.shape[-1],
                weights_bytes=_row_bytes(weights),
            )
        )


def expert_traffic(
    pieces: Sequence[str], watch: ExpertWatch, *, config: RunConfig, plan: Plan
) -> Iterator[Traffic]:
    """Yield what travels for the experts in and below the modules called ``pieces``.

    How many tokens leave a rank depends on the router: at most one for each of its choices and for
    each other rank.
    """
    degrees, m = config.mesh.degrees, plan.num_microbatches
    ep = degrees.ep
    # The skeleton's stream is whole without sequence parallel; experts see a rank's part of it.
    parts = 1 if config.tensor.sequence_parallel else degrees.tp
    calls = [call for call in watch.calls if _is_in(call.layer, pieces)]
    rows_bytes = 0
    for call in calls:
        rows = call.num_tokens // parts * min(call.top_k, ep - 1)
        # Tokens and weights there, tokens back, and the gradients of all; indices once.
        row = 2 * (2 * call.token_bytes + call.weights_bytes) + INDEX_BYTES * call.top_k
        rows_bytes += rows * row + sent(COUNT_BYTES * ep, ep)
    yield Traffic(
        what="to experts",
        collective="all-to-all",
        axis=str(Axis.EP),
        calls=8 * m * len(calls) if ep > 1 else 0,
        num_bytes=m * rows_bytes if ep > 1 else 0,
        at_most=True,
    )
    yield from _balance_traffic(
        [r for name, r in watch.routers.items() if _is_in(name, pieces)], config=config, plan=plan
    )


def _balance_traffic(
    routers: Sequence[Router], *, config: RunConfig, plan: Plan
) -> Iterator[Traffic]:
    degrees, m = config.mesh.degrees, plan.num_microbatches
    rows = config.batch.global_batch // degrees.dp // m
    losses = [r.sizes.num_experts for r in routers if r.sizes.balance_loss > 0]
    ranks = degrees.cp * degrees.tp
    yield Traffic(
        what="experts selected",
        collective="all-reduce",
        axis=_named(FOLDS[Axis.SEQUENCE], degrees),
        calls=m * len(losses),
        num_bytes=m * sum(all_reduced(COUNT_BYTES * rows * (n + 1), ranks) for n in losses),
    )
    biases = sum(r.sizes.num_experts for r in routers if r.bias is not None)
    yield Traffic(
        what="router biases",
        collective="all-reduce",
        axis=_named(FOLDS[Axis.ROUTED], degrees),
        calls=1,
        num_bytes=all_reduced(COUNT_BYTES * biases, degrees.dp * ranks),
    )


def _named(axes: Sequence[Axis], degrees: Degrees) -> str:
    return " x ".join(str(axis) for axis in axes if degrees.degree(axis) > 1)


def _is_in(name: str, pieces: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{piece}.") for piece in pieces)


def _row_bytes(x: Tensor) -> int:
    return x.shape[-1] * x.element_size()
