"""Explain module outputs: the first one in forward order that no later module makes up for.

A module may return a summand of what one process returns (a row-parallel layer before its sum). It
is right if the module around it is. Otherwise the sum is missing. Where ranks that compute the same
differ, a sum is missing as well. Where neither is so, the positions that are off tell what
attention saw: a causal row that sees everything anyway is right without a mask, the first slice is
right with positions that start again on every rank, and the first token is right whatever the
scores are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paralign.align.explain.calls import prove_other_calls, prove_other_order
from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import Context
from paralign.align.explain.expert_parts import prove_other_choices, prove_other_weights
from paralign.align.explain.forward import DIFFERENT_CONFIG, prove_output, stage_axes
from paralign.align.explain.missing import MISSING_CONTRIBUTION
from paralign.align.explain.old_shards import prove_old_shards
from paralign.align.explain.positions import error_by_position
from paralign.align.explain.precision import PRECISION
from paralign.align.explain.proof import Proof, evidence, finding_of
from paralign.align.explain.replicas import (
    MISSING_REDUCTION,
    prove_missing_reduction,
    spread_of,
)
from paralign.align.explain.single import on_one_rank, only_rank, single_finding
from paralign.align.inspect.feed import role_of
from paralign.align.judge import Compared
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

MASK_OR_POSITIONS = "mask_or_positions"
WRONG_AXIS = "wrong_axis"
UNKNOWN = "unknown"


def explain_outputs(context: Context, step: int) -> list[Finding]:
    """Explain the module outputs of ``step`` that are out of budget."""
    failing = context.failing(Kind.OUTPUT, step)
    if not failing or context.upstream:
        return []
    other = prove_other_choices(context, step)
    if other is not None:
        return [other]
    wrong = {item.row.name for item in failing}
    for item in failing:
        proof = prove_missing_reduction(context, item)
        if proof is not None and proof.cause == MISSING_REDUCTION and _is_made_up_for(item, wrong):
            continue
        if proof is None:
            proof = (
                prove_old_shards(context, item)
                or prove_other_calls(context, item)
                or prove_other_order(context, item)
                or prove_other_weights(context, item)
                or prove_output(context, item)
                or _differing(context, item)
                or _by_position(context, item)
            )
            # A module with other options is wrong itself, wherever its input came from.
            if proof is not None and not proof.axes and proof.cause != DIFFERENT_CONFIG:
                proof.axes = tuple(context.mesh.named(stage_axes(context, item)))
        else:
            item = _outermost(item, failing, context)
            proof.text = proof.text.replace("sum the gradient over", "sum the output over").replace(
                " before the optimizer uses it", ""
            )
        return [_alone(context, item, proof) or _finding(context, item, proof)]
    return []


def _alone(context: Context, item: Compared, proof: Proof | None) -> Finding | None:
    """Report one rank that is off by itself, where a proof says no more than how, or that it is."""
    if (
        proof is None
        or proof.cause not in (PRECISION, MISSING_CONTRIBUTION)
        or not on_one_rank(context, [(item, proof)])
    ):
        return None
    return single_finding(context, [(item, proof)], "forward")


def _is_made_up_for(item: Compared, wrong: set[str]) -> bool:
    """Whether the module around it returns what it should."""
    around = _around(item.row.name)
    return around != "" and around not in wrong


def _around(name: str) -> str:
    return name.rpartition(".")[0]


def _outermost(item: Compared, failing: Sequence[Compared], context: Context) -> Compared:
    """Return the widest module that returns the same pending sum."""
    by_name = {other.row.name: other for other in failing}
    while True:
        around = by_name.get(_around(item.row.name))
        if around is None or prove_missing_reduction(context, around) is None:
            return item
        item = around


def _differing(context: Context, item: Compared) -> Proof | None:
    """Ranks that hold the same tokens return different values, the first module to do so."""
    if not item.measured.replicas_differ:
        return None
    spread = spread_of(context, item)
    if not spread.differ or not spread.axes:
        return None
    over = " x ".join(spread.axes)
    return Proof(
        MISSING_REDUCTION,
        math.nan,
        tuple(context.mesh.named(spread.axes)),
        detail={"proof": "replicas differ"},
        text=f"Ranks along {over} hold the same tokens but return different values, and it is the "
        f"first module to do so: what each computed of it is not added up over {over}.",
        candidates=(
            str(Candidate("forward", MISSING_REDUCTION, spread.axes, "a sum that was left out")),
            str(Candidate("forward", "rng", spread.axes, "masks that each rank draws by itself")),
        ),
        separate_by=f"run again without dropout, and with {over} of size 1: a missing sum goes "
        "with the axis alone",
    )


def _by_position(context: Context, item: Compared) -> Proof | None:
    """Read the positions at which the output is off."""
    error = error_by_position(item)
    if error is None:
        return None
    limit = (item.tolerance or 0.0) * item.measured.total.base
    off = [not value <= limit for value in error]
    if len(off) < 3 or not any(off):
        return None
    cp = [axis for axis in context.mesh.live if role_of(axis) == "cp"]
    share = len(off) // math.prod(context.mesh.sizes[axis] for axis in cp) if cp else len(off)
    axes = tuple(context.mesh.named(cp))
    if not off[-1] and off[0]:
        return Proof(
            MASK_OR_POSITIONS,
            math.nan,
            detail={"positions_off": sum(off), "positions": len(off)},
            text="The last position, which sees all others anyway, is right, and those before it "
            "are not: they see what comes after them. The causal mask does not arrive here.",
            candidates=(
                str(Candidate("forward", MASK_OR_POSITIONS, (), "no mask arrives")),
                str(Candidate("forward", UNKNOWN, (), "something else spares the last position")),
            ),
            separate_by="run both again without a mask: if it is what is lost, they agree",
        )
    if cp and not any(off[:share]) and any(off[share:]):
        return Proof(
            MASK_OR_POSITIONS,
            math.nan,
            axes,
            detail={"positions_off": sum(off), "positions": len(off)},
            text=f"The first slice over {' x '.join(cp)} is right, those after it are not: they "
            "start again from position 0, or their mask does. Both count in the whole sequence.",
            candidates=(
                str(Candidate("forward", MASK_OR_POSITIONS, axes, "they start again on each rank")),
                str(Candidate("forward", UNKNOWN, axes, "something else spares the first slice")),
            ),
            separate_by=f"run again with {' x '.join(cp)} of size 1: what starts again goes",
        )
    if cp and not off[0] and all(off[1:]):
        return Proof(
            WRONG_AXIS,
            math.nan,
            axes,
            detail={"positions_off": sum(off), "positions": len(off)},
            text="The first position, which sees itself alone, is right, and every other is off: "
            "the right tokens are seen with wrong scores. Exchange the sequence for heads, not "
            "for the features that the scores are summed over.",
            candidates=(
                str(Candidate("forward", WRONG_AXIS, axes, "features where heads are due")),
                str(Candidate("forward", "constant_factor", (), "scores of another scale")),
            ),
            separate_by=f"run again with {' x '.join(cp)} of size 1: a factor stays, an exchange "
            "goes",
        )
    return None


def _finding(context: Context, item: Compared, proof: Proof | None) -> Finding:
    row = item.row
    if proof is not None:
        return finding_of([(item, proof)], "forward", f"The output of {row.name} is off.")
    finding = Finding(
        component="forward",
        cause=UNKNOWN,
        tensor=row.name,
        axes=list(context.mesh.named(stage_axes(context, item))),
        evidence={**evidence(item, None), "ranks": row.ranks_off, "step": row.step},
        fix=f"The output of {row.name} is the first that is off; all before it are right, and the "
        "ranks agree with each other. Compare what this module does with its inputs. (With "
        "--model it is run again on the reference's.)",
    )
    if only_rank(context, [item]) is not None:
        finding.cause = "single_rank"
    return finding
