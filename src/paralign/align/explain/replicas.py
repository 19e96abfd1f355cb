"""Hypotheses about replicas: what ranks hold of one tensor, though it should be the same.

After a gradient is reduced, replicas are equal to the last bit. Where they differ, the reduction is
missing along the axes they differ over, and their sum shows it: it is the reference. Where they
differ and the sum is a multiple of the reference, something was summed over another group instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.proof import (
    Added,
    Held,
    Mix,
    Proof,
    error_left,
    limit_of,
    parts_of,
    proves,
)
from paralign.align.judge import Compared
from paralign.align.pair import Piece
from paralign.layout import Box

MISSING_REDUCTION = "missing_reduction"
WRONG_GROUP = "wrong_group"


@dataclass(frozen=True)
class Spread:
    """How the replicas of a tensor differ.

    Attributes:
        axes: Smallest set of axes over which they do.
        clusters: Per distinct part, ranks that hold equal values.
    """

    axes: tuple[str, ...]
    clusters: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def differ(self) -> bool:
        """Whether any two replicas differ."""
        return any(len(groups) > 1 for groups in self.clusters)


def spread_of(context: Context, item: Compared) -> Spread:
    """Find out which replicas are equal and along which axes they differ."""
    clusters = tuple(_clusters(pieces) for pieces in item.side.replicas.values())
    for axes in context.mesh.subsets():
        if all(_explains(context, axes, groups) for groups in clusters):
            return Spread(axes, clusters)
    return Spread((), clusters)


def _explains(context: Context, axes: Sequence[str], groups: Sequence[Sequence[int]]) -> bool:
    """Whether ranks with the same coordinates but for ``axes``' complement hold equal values.

    Differences lie along ``axes`` if ranks that agree on these axes' coordinates are equal: going
    along the other axes changes nothing.
    """
    others = context.mesh.others(axes)
    holders = {rank for group in groups for rank in group}
    where = {rank: number for number, group in enumerate(groups) for rank in group}
    return all(
        where[peer] == where[rank]
        for rank in holders
        for peer in context.mesh.peers(rank, others)
        if peer in holders
    )


def _clusters(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
    """Group ranks by equal values, comparing part by part."""
    groups: list[list[Piece]] = [list(pieces)]
    for box in parts_of(pieces[0]):
        if all(len(group) == 1 for group in groups):
            break
        groups = [fine for group in groups for fine in _split(group, box)]
    return tuple(tuple(sorted(piece.rank for piece in group)) for group in groups)


def _split(group: Sequence[Piece], box: Box) -> list[list[Piece]]:
    found: list[tuple[torch.Tensor, list[Piece]]] = []
    for piece in group:
        values = piece.read(box)
        for known, members in found:
            if torch.equal(known, values):
                members.append(piece)
                break
        else:
            found.append((values, [piece]))
    return [members for _, members in found]


def prove_missing_reduction(context: Context, item: Compared) -> Proof | None:
    """Return the proof that replicas hold the summands of the reference."""
    if not item.measured.replicas_differ or limit_of(item) is None:
        return None
    spread = spread_of(context, item)
    if not spread.differ:
        return None
    # The axes they differ along come first; a wider set may hold equal summands as well.
    wider = [axes for axes in context.mesh.subsets() if set(spread.axes) <= set(axes)]
    wider = wider if spread.axes else []
    for axes in wider:
        proof = _sum_over(context, item, axes, factors=(1.0,))
        if proof is not None:
            return proof
    proof = _sum_of_clusters(context, item, spread)
    for axes in [] if proof is not None else wider:
        proof = _sum_over(context, item, axes, factors=_factors(context, axes))
        if proof is not None:
            return proof
    return proof


def _factors(context: Context, axes: tuple[str, ...]) -> tuple[float, ...]:
    """Return the multiples of the reference that a sum along ``axes`` may be."""
    degree = context.mesh.degree(axes)
    sizes = [degree, *context.sizes.values()]
    return tuple(dict.fromkeys([*map(float, sizes), *(1.0 / size for size in sizes)]))


def _sum_over(
    context: Context, item: Compared, axes: tuple[str, ...], *, factors: Sequence[float]
) -> Proof | None:
    """Test whether the sum of the replicas along ``axes`` is the reference or a multiple of it."""
    sums = _summed(context, item, axes)
    if sums is None:
        return None
    for factor in factors:
        left = _left_by_part(item, sums, factor)
        if proves(item, left):
            return _proof(context, axes, factor, left)
    return None


def _summed(context: Context, item: Compared, axes: tuple[str, ...]) -> list[list[Held]] | None:
    """Return per distinct part the sums over groups along ``axes``; None if no group is whole."""
    result: list[list[Held]] = []
    for pieces in item.side.replicas.values():
        by_rank = {piece.rank: piece for piece in pieces}
        groups = {context.mesh.peers(rank, axes) for rank in by_rank}
        # Every group must be replicas only: else the axes shard the tensor and nothing is added.
        if any(not set(group) <= set(by_rank) for group in groups):
            return None
        result.append(
            [Added(tuple((1.0, by_rank[rank]) for rank in group)) for group in sorted(groups)]
        )
    return result


def _left_by_part(item: Compared, sums: Sequence[Sequence[Held]], factor: float) -> float:
    limit = limit_of(item) or 0.0
    norm = item.measured.total.base * abs(factor)
    base = Mix(((factor, item.base),))
    worst = 0.0
    for copy in range(max(len(groups) for groups in sums)):
        chosen = [groups[min(copy, len(groups) - 1)] for groups in sums]
        worst = max(worst, error_left(chosen, base, norm, stop_at=limit))
    return worst


def _proof(context: Context, axes: tuple[str, ...], factor: float, left: float) -> Proof:
    degree = context.mesh.degree(axes)
    over = " x ".join(axes)
    if factor == 1.0:
        return Proof(
            MISSING_REDUCTION,
            left,
            tuple(context.mesh.named(axes)),
            key=(MISSING_REDUCTION, axes, "sum"),
            detail={"operation": "sum"},
            text=f"The replicas over {over} differ, and their sum is the reference: sum the "
            f"gradient over {over} before the optimizer uses it.",
        )
    if factor == float(degree):
        return _mean(context, axes, left)
    live = context.mesh.live
    others = [a for a in live if a not in axes and context.mesh.sizes[a] == factor]
    if factor > 1 and others:
        return Proof(
            WRONG_GROUP,
            left,
            tuple(context.mesh.named(axes)),
            key=(WRONG_GROUP, axes, factor),
            detail={"sum_is": factor, "reduced_over": others},
            text=f"The replicas over {over} differ, and their sum is {factor:g} times the "
            f"reference: the sum was taken over {' or '.join(others)} instead, where all ranks "
            f"hold the same. Give this reduction the group of {over}.",
        )
    return Proof(
        MISSING_REDUCTION,
        left,
        tuple(context.mesh.named(axes)),
        key=(MISSING_REDUCTION, axes, factor),
        detail={"operation": "sum", "factor": f"{factor:g}"},
        text=f"The replicas over {over} differ, and their sum is {factor:g} times the reference: "
        f"the sum over {over} is missing, and a factor {factor:g} is wrong besides.",
    )


def _mean(context: Context, axes: tuple[str, ...], left: float) -> Proof:
    over = " x ".join(axes)
    same = [
        axis
        for axis in context.mesh.live
        if axis not in axes and context.mesh.sizes[axis] == context.mesh.degree(axes)
    ]
    proof = Proof(
        MISSING_REDUCTION,
        left,
        tuple(context.mesh.named(axes)),
        key=(MISSING_REDUCTION, axes, "mean"),
        detail={"operation": "mean"},
        text=f"The replicas over {over} differ, and their mean is the reference: average the "
        f"gradient over {over} before the optimizer uses it.",
    )
    if same:
        proof.candidates = (
            str(Candidate("reduction", MISSING_REDUCTION, axes, "their mean is the reference")),
            str(Candidate("reduction", WRONG_GROUP, axes, f"summed over {same[0]} instead")),
        )
        proof.separate_by = (
            f"run again with {axes[0]} and {same[0]} of different sizes: the factor follows the "
            "group that was used"
        )
    return proof


def _sum_of_clusters(context: Context, item: Compared, spread: Spread) -> Proof | None:
    """Test whether groups that do not follow the mesh were reduced, one by one."""
    sums: list[list[Held]] = []
    for pieces, groups in zip(item.side.replicas.values(), spread.clusters, strict=True):
        if len({len(group) for group in groups}) != 1 or len(groups[0]) == 1 or len(groups) == 1:
            return None
        by_rank = {piece.rank: piece for piece in pieces}
        sums.append([Added(tuple((1.0, by_rank[group[0]]) for group in groups))])
    left = _left_by_part(item, sums, 1.0)
    if not proves(item, left):
        return None
    members = [list(group) for group in spread.clusters[0]]
    everyone = [rank for group in members for rank in group]
    return Proof(
        WRONG_GROUP,
        left,
        tuple(context.mesh.named(context.mesh.axes_of(everyone))),
        key=(WRONG_GROUP, str(members)),
        detail={"groups": members},
        text=f"It was reduced within the groups {members}, which are no group of the mesh; the sum "
        "over these groups is the reference. Build the group from the mesh.",
    )


def differing_replicas(context: Context, item: Compared) -> Proof | None:
    """Say along which axes replicas differ, where no reference can be trusted any more.

    Something earlier is wrong already, so no sum can match the reference. But no correct reduction
    leaves replicas different, whatever went into it.
    """
    if not item.measured.replicas_differ:
        return None
    spread = spread_of(context, item)
    if not spread.differ or not spread.axes:
        return None
    over = " x ".join(spread.axes)
    return Proof(
        MISSING_REDUCTION,
        float("nan"),
        tuple(context.mesh.named(spread.axes)),
        key=(MISSING_REDUCTION, spread.axes, "differ"),
        detail={"proof": "replicas differ"},
        text=f"The replicas over {over} differ, which no reduction over {over} leaves behind: it "
        "is missing, whatever else is wrong before it.",
        candidates=(
            str(Candidate("reduction", MISSING_REDUCTION, spread.axes, "it is left out")),
            str(Candidate("reduction", WRONG_GROUP, spread.axes, "it is taken over other ranks")),
        ),
        separate_by="mend what is wrong before it and run again: then their sum tells",
    )
