"""Hypotheses about experts' output that is made again from what each chosen expert makes of it.

::

    y_t = sum over choices k of  a_tk * down_e(silu(gate_e(x_t)) * up_e(x_t)),   e = chosen_tk

Where tokens, choices and the experts' own parameters are right, what is wrong is the shares ``a``
or which experts were met. The formula is tried on the reference first: experts that compute
something else are not explained here.

Ref:
    Shazeer, "GLU Variants Improve Transformer", 2020. https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.own_parts import all_of, experts_of_ranks, parameter_of
from paralign.align.explain.placement import PERMUTED_SHARDS
from paralign.align.explain.proof import Proof, limit_of, proves
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.layout import boxes

_MOST_ELEMENTS = 1 << 25  # of parameters, and of what experts make; larger ones are not read
_INPUTS_TRIED = 6

Piece = tuple[Tensor, slice, slice]
"""Of one rank: an output ``[rows, positions, D]``, and where its rows and positions lie."""


@dataclass(frozen=True)
class Made:
    """What experts make of every token.

    Attributes:
        tokens: ``[rows, positions, D]``.
        choices: ``[rows, positions, K]`` int64.
        weights: ``[rows, positions, K]``, of the router.
        stack: ``gate``, ``up``, ``down`` and their biases, of all experts.
    """

    tokens: Tensor
    choices: Tensor
    weights: Tensor
    stack: dict[str, Tensor]

    def parts(self, choices: Tensor) -> Tensor:
        """Return what each of ``choices`` makes of each token, ``[rows, positions, K, D]``."""
        made = self.tokens.new_zeros(*choices.shape, self.tokens.shape[-1])
        for expert in choices.unique().tolist():
            row, position, choice = (choices == expert).nonzero(as_tuple=True)
            made[row, position, choice] = self._expert(expert, self.tokens[row, position])
        return made

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        def linear(name: str, x: Tensor) -> Tensor:
            bias = self.stack.get(f"{name}_bias")
            return F.linear(x, self.stack[name][expert], None if bias is None else bias[expert])

        return linear("down", F.silu(linear("gate", x)) * linear("up", x))


def prove_applied_weights(
    context: Context, item: Compared, choices: Compared, weights: Compared
) -> Proof | None:
    """Return the proof that experts' outputs were added up with other weights, or are others'.

    Args:
        context: The comparison.
        item: The output of experts; off.
        choices: What the router beside it chose; right.
        weights: The router's weights of them; right.
    """
    limit = limit_of(item)
    if limit is None:
        return None
    made = _make(context, item, all_of(choices.base), all_of(weights.base), limit)
    if made is None:
        return None
    parts = made.parts(made.choices)
    pieces = list(_pieces(item))
    return (
        _squared(item, pieces, parts, made.weights)
        or _other_experts(context, item, pieces, made)
        or _other_shares(item, pieces, parts, made.weights, limit)
    )


def _make(
    context: Context, item: Compared, choices: Tensor, shares: Tensor, limit: float
) -> Made | None:
    """Find the tokens and parameters of which the reference's output is made."""
    stack = _stack(context, item)
    size = item.base.shape
    if stack is None or math.prod(size) * choices.shape[-1] > _MOST_ELEMENTS:
        return None
    due = all_of(item.base)
    outputs = context.judged(Kind.OUTPUT, item.moment.step)
    before = outputs[: next(n for n, output in enumerate(outputs) if output is item)]
    alike = [o for o in before[::-1] if o.row.ok and tuple(o.base.shape) == tuple(size)]
    for tokens in alike[:_INPUTS_TRIED]:
        made = Made(all_of(tokens.base), choices.long(), shares, stack)
        again = _mixture(made.parts(made.choices), shares)
        error = float(torch.linalg.vector_norm(again - due))
        if error <= limit * float(torch.linalg.vector_norm(due)):
            return made
    return None


def _stack(context: Context, item: Compared) -> dict[str, Tensor] | None:
    found: dict[str, Tensor] = {}
    for leaf in ("gate", "up", "down"):
        weight = parameter_of(context, item, leaf)
        if weight is None or len(weight.shape) != 3:
            return None
        if math.prod(weight.shape) > _MOST_ELEMENTS:
            return None
        found[leaf] = all_of(weight)
        if (bias := parameter_of(context, item, f"{leaf}_bias")) is not None:
            found[f"{leaf}_bias"] = all_of(bias)
    return found


def _pieces(item: Compared) -> Iterator[Piece]:
    for pieces in item.side.replicas.values():
        for piece in pieces:
            for box in boxes(piece.map):
                (row, at), (rows, length) = box.start[:2], box.shape[:2]
                yield piece.read(box), slice(row, row + rows), slice(at, at + length)


def _mixture(parts: Tensor, shares: Tensor) -> Tensor:
    return (parts * shares.unsqueeze(-1)).sum(-2)


def _left(pieces: list[Piece], whole: Tensor) -> float:
    """Return the relative error of all pieces against a tensor that was made."""
    error = math.hypot(
        *(float(torch.linalg.vector_norm(y - whole[at, to])) for y, at, to in pieces)
    )
    norm = math.hypot(*(float(torch.linalg.vector_norm(y)) for y, _, _ in pieces))
    return error / norm if norm else math.inf


def _squared(item: Compared, pieces: list[Piece], parts: Tensor, shares: Tensor) -> Proof | None:
    left = _left(pieces, _mixture(parts, shares.square()))
    if not proves(item, left):
        return None
    return Proof(
        "different_config",
        left,
        key=("different_config", "applied twice"),
        text="It is the sum of what a token's experts make of it, each times the square of its "
        "weight: the weight is applied twice. Multiply by it where experts' rows are added up, or "
        "where they are sent, but not in both places.",
    )


def _other_experts(
    context: Context, item: Compared, pieces: list[Piece], made: Made
) -> Proof | None:
    """Test whether each token meets the experts that lie some ranks of ep further on."""
    num_experts = made.stack["gate"].shape[0]
    firsts = sorted({first for first, _ in experts_of_ranks(context, item.row.name).values()})
    for shift in (first for first in firsts if first):
        parts = made.parts((made.choices + shift) % num_experts)
        left = _left(pieces, _mixture(parts, made.weights))
        if proves(item, left):
            return Proof(
                PERMUTED_SHARDS,
                left,
                ("ep",),
                key=(PERMUTED_SHARDS, "experts", shift),
                detail={"shift": shift},
                text=f"Tokens meet the expert {shift} further on than the one they chose, which is "
                "another rank's of ep. Compare the order of ranks in the exchange, and the numbers "
                "that experts have on their rank.",
            )
    return None


def _other_shares(
    item: Compared, pieces: list[Piece], parts: Tensor, shares: Tensor, limit: float
) -> Proof | None:
    """Find the shares with which the chosen experts give what there is, if any do."""
    error = norm = 0.0
    low, high = math.inf, -math.inf
    if parts.shape[-2] >= parts.shape[-1]:
        return None  # so many experts make anything of so few features
    for y, at, to in pieces:
        columns = parts[at, to].transpose(-1, -2)
        found = torch.linalg.lstsq(columns, y.unsqueeze(-1)).solution
        rest = y - (columns @ found).squeeze(-1)
        error = math.hypot(error, float(torch.linalg.vector_norm(rest)))
        norm = math.hypot(norm, float(torch.linalg.vector_norm(y)))
        ratio = found.squeeze(-1) / shares[at, to]
        low, high = min(low, float(ratio.min())), max(high, float(ratio.max()))
    left = error / norm if norm else math.inf
    if not left <= limit or not proves(item, left):
        return None
    return Proof(
        "different_config",
        left,
        key=("different_config", "other shares"),
        detail={"least": low, "largest": high},
        text=f"It is a sum of what the chosen experts make of each token, with {low:.6g} to "
        f"{high:.6g} times the router's weights: they are changed on their way, or others are "
        "applied.",
    )
