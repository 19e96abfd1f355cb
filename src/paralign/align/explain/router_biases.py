"""Hypotheses about the biases that balance experts: which tokens' choices they were moved by.

Once a step every bias moves by one fixed amount, down where more than an even share of all tokens
chose its expert, and up where fewer did. The choices are recorded, so what a rank did can be made
again from any set of tokens.

Ref:
    Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    https://arxiv.org/abs/2408.15664
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.align.explain.context import Context
from paralign.align.explain.expert_parts import CHOICES
from paralign.align.explain.factors import CONSTANT_FACTOR
from paralign.align.explain.labels import IGNORED
from paralign.align.explain.own_parts import all_of
from paralign.align.explain.proof import Proof, finding_of
from paralign.align.explain.replicas import MISSING_REDUCTION
from paralign.align.explain.stale import STALE
from paralign.align.explain.weights_of import TOKEN_WEIGHTING
from paralign.align.judge import Compared
from paralign.align.pair import UPDATE, Moment
from paralign.align.trace import Kind
from paralign.align.verdict import Finding
from paralign.layout import Box, boxes

_SAME = 1e-6  # moves are whole numbers of one amount


@dataclass(frozen=True)
class Moves:
    """What a step did to one router's biases, in units of the amount that they move by.

    Attributes:
        due: The reference's moves, ``[E]``.
        made: Per rank its moves, ``[E]``.
        counts: Per rank how often the predicted tokens it routed chose each expert, ``[E]``.
        all_counts: The same of all tokens of the batch, masked ones too, ``[E]``.
    """

    due: Tensor
    made: Mapping[int, Tensor]
    counts: Mapping[int, Tensor]
    all_counts: Tensor


def explain_router_biases(context: Context, step: int) -> list[Finding]:
    """Return one finding about biases that moved otherwise, where tokens' choices say why."""
    choices = {
        item.row.name.removesuffix(CHOICES): item
        for item in context.judged(Kind.OUTPUT, step)
        if item.row.name.endswith(CHOICES) and item.row.ok
    }
    proven: list[tuple[Compared, Proof]] = []
    for item in context.failing(UPDATE, step) or context.failing(Kind.PARAM_AFTER, step):
        router = choices.get(item.row.name.rpartition(".")[0])
        moves = None if router is None else _moves(context, item, router)
        proof = None if moves is None else _proof(context, moves)
        if proof is not None and (not proven or proof.key == proven[0][1].key):
            proven.append((item, proof))
    if not proven:
        return []
    names = ", ".join(item.row.name for item, _ in proven[:3])
    return [finding_of(proven, "state", f"{names} moved otherwise than they should.")]


def _moves(context: Context, item: Compared, router: Compared) -> Moves | None:
    step, name = item.moment.step, item.row.name
    after = Moment.of(step, Kind.PARAM_AFTER)
    labels = next((i for i in context.judged(Kind.INPUT, step) if i.row.name == "labels"), None)
    sides = {}
    for side in (context.reference, context.parallel):
        now = side.quantity(after, name)
        before = side.quantity(Moment.of(step, Kind.PARAM), name) or side.quantity(
            Moment.of(step - 1, Kind.PARAM_AFTER), name
        )
        if now is None or before is None or now.problems or before.problems:
            return None
        whole = Box((0,), (0,), now.shape)
        start = before.fetch(whole)
        sides[side is context.parallel] = {p.rank: p.read(whole) - start for p in now.pieces}
    due = next(iter(sides[False].values()))
    unit = float(due.abs().max())
    if labels is None or not unit > 0.0 or len(due.shape) != 1:
        return None
    chosen, is_valid = all_of(router.base).long(), all_of(labels.base) != IGNORED
    if chosen.shape[:2] != is_valid.shape or any(len(p) != len(due) for p in sides[True].values()):
        return None
    counts = {rank: torch.zeros(len(due), dtype=torch.int64) for rank in sides[True]}
    for pieces in router.side.replicas.values():
        for piece in pieces:
            for box in boxes(piece.map):
                at = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))[:2]
                own = _counted(chosen[at][is_valid[at]], len(due))
                counts[piece.rank] = counts.get(piece.rank, torch.zeros_like(own)) + own
    return Moves(
        due / unit,
        {rank: move / unit for rank, move in sides[True].items()},
        counts,
        _counted(chosen, len(due)),
    )


def _counted(chosen: Tensor, num_experts: int) -> Tensor:
    return chosen.flatten().bincount(minlength=num_experts)


def _moved_by(counts: Tensor) -> Tensor:
    return -(counts * len(counts) - counts.sum()).sign().double()


def _is(made: Tensor, due: Tensor) -> bool:
    return bool(((made - due).abs() <= _SAME).all())


def _proof(context: Context, moves: Moves) -> Proof | None:
    made = list(moves.made.values())
    if all(_is(move, torch.zeros_like(move)) for move in made):
        return Proof(
            STALE,
            0.0,
            key=(STALE,),
            text="They did not move at all: nothing updates them in this run. Call the update once "
            "a step, between backward and the optimizer's step.",
        )
    factor = float(made[0].abs().max())
    if abs(factor - 1.0) > _SAME and all(_is(move, factor * moves.due) for move in made):
        return Proof(
            CONSTANT_FACTOR,
            0.0,
            key=(CONSTANT_FACTOR, round(factor, 6)),
            detail={"factor": f"{factor:.6g}"},
            text=f"They moved {factor:.6g} times as far: the update ran more or less often than "
            "once a step, or by another amount.",
        )
    if all(_is(move, _moved_by(moves.all_counts)) for move in made):
        return Proof(
            TOKEN_WEIGHTING,
            0.0,
            key=(TOKEN_WEIGHTING,),
            text="They moved by the choices of all tokens, those of padding as well. Count tokens "
            "that are predicted.",
        )
    for axes in context.mesh.subsets():
        if all(
            _is(move, _moved_by(_of_group(context, moves, r, axes)))
            for r, move in moves.made.items()
        ):
            over = " x ".join(axes)
            return Proof(
                MISSING_REDUCTION,
                0.0,
                tuple(context.mesh.named(axes)),
                key=(MISSING_REDUCTION, axes),
                text=f"Every rank moved them by the choices of its own part of the tokens: sum the "
                f"counts over {over} before they are compared.",
            )
    return None


def _of_group(context: Context, moves: Moves, rank: int, axes: tuple[str, ...]) -> Tensor:
    """Return the counts of the ranks that a sum without ``axes`` adds up."""
    group = context.mesh.peers(rank, context.mesh.others(axes))
    total: Tensor = sum(
        (moves.counts[peer] for peer in group if peer in moves.counts),
        torch.zeros_like(moves.all_counts),
    )
    return total
