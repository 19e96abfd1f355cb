"""Test a hypothesis on the numbers: does the corrected tensor fall back into its budget?

A hypothesis is a pair of readable tensors that would be equal if it were right: pieces of the run
under test, possibly added up, and a weighted sum of tensors of the reference. Both are read in
parts, so a proof needs no more memory than the comparison did, and a wrong guess stops at the part
that refutes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paralign.align.judge import Compared
from paralign.align.measure import PART_ELEMENTS
from paralign.align.quantity import weighted_sum
from paralign.align.verdict import Finding
from paralign.layout import Box, LocalMap, boxes

# A correction that leaves more than this share of the error explains nothing, even if the budget of
# a low-precision run would let it pass.
_MUST_REMOVE = 3.0


class Readable(Protocol):
    """Anything that can be asked for a part of a global tensor, in fp64."""

    def fetch(self, box: Box) -> Tensor:
        """Return the part at ``box``."""
        ...


class Held(Protocol):
    """A rank's piece of a tensor."""

    @property
    def rank(self) -> int:
        """The rank that holds it."""
        ...

    @property
    def map(self) -> LocalMap:
        """What it holds."""
        ...

    def read(self, box: Box) -> Tensor:
        """Return the part ``box`` in fp64."""
        ...


@dataclass(frozen=True)
class Mix:
    """A weighted sum of readable tensors."""

    terms: tuple[tuple[float, Readable], ...]

    def fetch(self, box: Box) -> Tensor:
        """Return the part at ``box``."""
        return weighted_sum((weight, term.fetch(box)) for weight, term in self.terms)


@dataclass(frozen=True)
class Added:
    """Pieces with the same map, added up with weights; stands for one piece."""

    members: tuple[tuple[float, Held], ...]

    @property
    def rank(self) -> int:
        """The first member's."""
        return self.members[0][1].rank

    @property
    def map(self) -> LocalMap:
        """What every member holds."""
        return self.members[0][1].map

    def read(self, box: Box) -> Tensor:
        """Return the part ``box`` in fp64."""
        return weighted_sum((weight, piece.read(box)) for weight, piece in self.members)


@dataclass
class Proof:
    """A hypothesis that holds for one tensor."""

    cause: str
    left: float
    """Relative error that is left after the correction; NaN where none was made."""
    axes: tuple[str, ...] = ()
    component: str | None = None
    key: tuple[Any, ...] = ()
    """Tensors with equal keys share one finding."""
    text: str = ""
    """What to do, after the numbers; the same for all tensors with this key."""
    detail: dict[str, Any] = field(default_factory=dict)
    candidates: tuple[str, ...] = ()
    separate_by: str | None = None


def parts_of(piece: Held) -> Iterator[Box]:
    """Yield the boxes of a piece, in parts that fit into memory."""
    for box in boxes(piece.map):
        yield from box.split(PART_ELEMENTS)


def error_left(
    pieces: Sequence[Held], base: Readable, norm: float, *, stop_at: float = math.inf
) -> float:
    """Return ``|pieces - base| / norm``; infinite as soon as it is above ``stop_at``.

    Args:
        pieces: Together the tensor, once; replicas are tested one by one by the caller.
        base: What they should be.
        norm: What the error is relative to.
        stop_at: Where to give up.
    """
    if not norm > 0.0:
        return math.inf
    error = 0.0
    for piece in pieces:
        for box in parts_of(piece):
            difference = float(torch.linalg.vector_norm(piece.read(box) - base.fetch(box)))
            if not math.isfinite(difference):
                return math.inf
            error = math.hypot(error, difference)
            if not error <= stop_at * norm:
                return math.inf
    return error / norm


def proves(item: Compared, left: float) -> bool:
    """Whether a correction that leaves ``left`` explains ``item``.

    What is left must be within the tensor's budget, and clearly less than there was.
    """
    limit = limit_of(item)
    if limit is None or not left <= limit:
        return False
    before = item.measured.total.relative
    return not before < math.inf or left * _MUST_REMOVE <= before


def limit_of(item: Compared) -> float | None:
    """Return the relative budget of a tensor; None if it is not gated."""
    return item.tolerance


def pieces_once(item: Compared) -> list[Held]:
    """Return one piece per distinct part of the tensor."""
    return [pieces[0] for pieces in item.side.replicas.values()]


def worst_replicas(item: Compared) -> list[list[Held]]:
    """Return the tensor as one list of pieces per replica, so that each can be tested.

    Replicas that are equal are tested once: the comparison knows whether any differ.
    """
    if not item.measured.replicas_differ:
        return [pieces_once(item)]
    depth = max(len(pieces) for pieces in item.side.replicas.values())
    return [
        [pieces[min(copy, len(pieces) - 1)] for pieces in item.side.replicas.values()]
        for copy in range(depth)
    ]


def left_in_all(item: Compared, base: Readable, norm: float) -> float:
    """Return the largest error any replica of ``item`` leaves against ``base``."""
    limit = limit_of(item)
    stop = math.inf if limit is None else limit
    worst = 0.0
    for pieces in worst_replicas(item):
        worst = max(worst, error_left(pieces, base, norm, stop_at=stop))
        if not worst <= stop:
            return math.inf
    return worst


def evidence(item: Compared, left: float | None) -> dict[str, Any]:
    """Return the numbers that every finding about a tensor shows."""
    row = item.row
    per_eps = row.eps / row.rel_l2 if row.rel_l2 and math.isfinite(row.rel_l2) else None
    if per_eps is None and row.budget_eps and item.tolerance:
        per_eps = row.budget_eps / item.tolerance
    if left is None or math.isnan(left) or per_eps is None:
        after = None  # NaN: read from a pattern, no tensor was corrected
    else:
        after = left * per_eps
    return {
        "eps_before": row.eps,
        "eps_after": after,
        "share_beyond_2e-3": row.share_beyond,
        "cosine": row.cosine,
        "scale": row.scale,
    }


def finding_of(proven: Sequence[tuple[Compared, Proof]], component: str, told: str) -> Finding:
    """Join the tensors that one hypothesis explains into one finding.

    Args:
        proven: They, with equal keys.
        component: Where the cause sits, unless the proof knows better.
        told: What the numbers say, in a sentence.
    """
    worst, proof = max(proven, key=lambda pair: pair[0].row.strain)
    names = sorted({item.row.label for item, _ in proven})
    return Finding(
        component=proof.component or component,
        cause=proof.cause,
        tensor=worst.row.label,
        axes=list(proof.axes),
        evidence={
            **evidence(worst, proof.left),
            **proof.detail,
            "tensors": len(proven),
            "names": names[:_NAMES_SHOWN],
            "step": worst.row.step,
        },
        fix=f"{told} {proof.text}".strip(),
        candidates=list(proof.candidates),
        separate_by=proof.separate_by,
    )


_NAMES_SHOWN = 20
