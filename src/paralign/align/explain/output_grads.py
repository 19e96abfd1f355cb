"""Explain gradients of module outputs: the first one in backward order that is off.

Everything a rank has still to compute follows from it, so it names the module whose backward is
wrong, also where the gradients of all parameters before it are off in no way that has a name.
"""

from __future__ import annotations

import math

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.factors import prove_factor
from paralign.align.explain.forward import prove_other_rows, prove_permuted_features
from paralign.align.explain.missing import prove_absent, prove_zeros
from paralign.align.explain.positions import error_by_position
from paralign.align.explain.precision import prove_noise, prove_rounded
from paralign.align.explain.proof import Proof, evidence, finding_of
from paralign.align.explain.replicas import MISSING_REDUCTION, prove_missing_reduction
from paralign.align.explain.single import on_one_rank, single_finding
from paralign.align.inspect.feed import role_of
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding


def explain_output_grads(context: Context, step: int) -> list[Finding]:
    """Explain the first gradient of a module's output that is out of budget at ``step``."""
    failing = context.failing(Kind.OUTPUT_GRAD, step)
    if not failing:
        return []
    first = failing[0]
    for hypothesis in (
        prove_absent,
        prove_factor,
        prove_missing_reduction,
        prove_other_rows,
        prove_permuted_features,
        prove_rounded,
        prove_zeros,
        prove_own_slice,
        prove_noise,
    ):
        proof = hypothesis(context, first)
        if proof is None:
            continue
        if on_one_rank(context, [(first, proof)]):
            return [single_finding(context, [(first, proof)], "backward")]
        return [finding_of([(first, proof)], "backward", _told(first))]
    return [_unknown(context, first)]


def _unknown(context: Context, first: Compared) -> Finding:
    """Say where it begins; slices that tp gathers for their use may lack the sum of its ranks."""
    row = first.row
    finding = Finding(
        component="backward",
        cause="unknown",
        tensor=row.name,
        evidence={**evidence(first, None), "ranks": row.ranks_off, "step": row.step},
        fix=f"{_told(first)} Compare the backward of what uses it.",
    )
    if axes := _cut_over_tp(context, first):
        over = " x ".join(axes)
        finding.candidates = [
            str(Candidate("backward", MISSING_REDUCTION, axes, "gathered, and not summed again")),
            str(Candidate("backward", "unknown", (), "what uses it computes something else")),
        ]
        finding.separate_by = f"run again with {over} of size 1: a missing sum goes"
        finding.fix += (
            f" Each rank of {over} has a slice of it: where it is gathered for its use, the "
            "backward sums the ranks' gradients and hands each its slice (a reduce-scatter)."
        )
    return finding


def _cut_over_tp(context: Context, item: Compared) -> tuple[str, ...]:
    """Return the axis of tensor parallelism if its ranks hold different parts of the tensor."""
    maps = {piece.rank: piece.map for pieces in item.side.replicas.values() for piece in pieces}
    found = [
        axis
        for axis in context.mesh.live
        if role_of(axis) == "tp"
        if any(
            maps[peer] != maps[rank]
            for rank in maps
            for peer in context.mesh.peers(rank, [axis])
            if peer in maps
        )
    ]
    return tuple(context.mesh.named(found))


def _told(item: Compared) -> str:
    return (
        f"The gradient of the output of {item.row.name} is the first in the backward that is off: "
        "the forward is right, and so are the gradients of all modules after it."
    )


def prove_own_slice(context: Context, item: Compared) -> Proof | None:
    """Read from positions that keys got no gradient from other ranks' queries.

    Under a causal mask the last slice of the sequence is seen by its own queries alone: it is
    right, and all before it are not, while the queries' own gradients are.
    """
    cp = [axis for axis in context.mesh.live if role_of(axis) == "cp"]
    error = error_by_position(item)
    if not cp or error is None or not _has_right_sibling(context, item):
        return None
    limit = (item.tolerance or 0.0) * item.measured.total.base
    off = [not value <= limit for value in error]
    degree = math.prod(context.mesh.sizes[axis] for axis in cp)
    right = next((n for n, wrong in enumerate(reversed(off)) if wrong), len(off))
    if right not in (len(off) // degree, len(off) // (2 * degree)) or not all(off[:-right]):
        return None
    over = " x ".join(cp)
    axes = tuple(context.mesh.named(cp))
    return Proof(
        MISSING_REDUCTION,
        math.nan,
        axes,
        detail={"positions_right": right, "positions": len(off)},
        text=f"The last {right} of {len(off)} positions, a slice that no other rank's queries see, "
        f"are right, and all before them are off. Sum the gradients of gathered keys and values "
        f"over {over} (a reduce-scatter); keeping each rank's own part loses the others'.",
        candidates=(
            str(Candidate("backward", MISSING_REDUCTION, axes, "other ranks' queries are missing")),
            str(Candidate("backward", "unknown", (), "another mask in the backward")),
        ),
        separate_by=f"run again with {over} of size 1: a missing sum goes, another mask stays",
    )


def _has_right_sibling(context: Context, item: Compared) -> bool:
    """Whether the gradient of another output in the same module is right: that of the queries."""
    around = item.row.name.rpartition(".")[0]
    return bool(around) and any(
        other.row.ok and other.row.name.rpartition(".")[0] == around
        for other in context.judged(Kind.OUTPUT_GRAD, item.moment.step)
    )
