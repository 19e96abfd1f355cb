"""Hypothesis: a tensor is the reference's times one number.

A mean where a sum belongs, a loss normalised by the wrong count, or a reduction that is done twice
leaves every element right but for a factor. Which of them it was, the factor alone cannot say: where
several axes have the size it needs, all are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from paralign.align.explain.candidates import (
    axes_in,
    candidate,
    fraction_factor,
    separate_sizes,
    simple_factor,
    sources_of,
    told_sizes,
)
from paralign.align.explain.context import Context
from paralign.align.explain.proof import (
    Mix,
    Proof,
    error_left,
    left_in_all,
    limit_of,
    proves,
)
from paralign.align.explain.weights_of import Weights as Recipe
from paralign.align.judge import Compared

CONSTANT_FACTOR = "constant_factor"
DOUBLE_REDUCTION = "double_reduction"

_ONE = 1e-6
_ADVICE = (
    "Look for a mean where a sum belongs, a sum where a mean belongs, a loss divided by the wrong "
    "count, or a reduction done twice."
)


def prove_factor(context: Context, item: Compared) -> Proof | None:
    """Return the proof that all of ``item`` is one factor off, if it is."""
    scale, limit = item.measured.total.scale, limit_of(item)
    if scale is None or scale == 0.0 or limit is None:
        return None
    named = named_factor(scale, limit)
    for factor in dict.fromkeys([float(named) if named is not None else scale, scale]):
        if factor == 1.0:
            continue
        base = Mix(((factor, item.base),))
        left = left_in_all(item, base, item.measured.total.base * abs(factor))
        if proves(item, left):
            exact = named if named is not None and factor == float(named) else None
            return _proof(left, factor, exact)
    return None


def named_factor(scale: float, tolerance: float) -> Fraction | None:
    """Return the small number that ``scale`` is meant to be; None if it is none."""
    return simple_factor(scale) or fraction_factor(scale, max(tolerance, 1e-12))


def prove_factor_by_rank(context: Context, item: Compared) -> Proof | None:
    """Return the proof that some ranks' pieces are one factor off and all others right."""
    off = set(item.row.ranks_off)
    limit = limit_of(item)
    if limit is None or not off or off == set(item.measured.by_rank):
        return None
    scales = {rank: item.measured.by_rank[rank].scale for rank in off}
    known = [scale for scale in scales.values() if scale]
    if len(known) != len(scales):
        return None
    if max(known) - min(known) > 1e-2 * abs(known[0]):
        return None
    named = named_factor(known[0], limit)
    factor = float(named) if named is not None else known[0]
    if factor == 1.0:
        return None
    base = Mix(((factor, item.base),))
    worst = 0.0
    for pieces in item.side.replicas.values():
        for piece in pieces:
            if piece.rank in off:
                norm = item.measured.by_rank[piece.rank].base * abs(factor)
                worst = max(worst, error_left([piece], base, norm, stop_at=limit))
    if not proves(item, worst):
        return None
    proof = _proof(worst, factor, named)
    proof.detail["ranks"] = sorted(off)
    proof.key = (*proof.key, *sorted(off))
    return proof


def _proof(left: float, factor: float, exact: Fraction | None) -> Proof:
    told = str(exact) if exact is not None else f"{factor:.12g}"
    return Proof(
        CONSTANT_FACTOR,
        left,
        key=(CONSTANT_FACTOR, told),
        detail={"factor": told},
    )


def factor_of(proof: Proof) -> Fraction | None:
    """Return the factor of a proof as a fraction, where it is one."""
    told = str(proof.detail["factor"])
    return None if "." in told or "e" in told else Fraction(told)


def name_source(
    context: Context, proof: Proof, *, everywhere: bool, recipe: Recipe | None = None
) -> None:
    """Complete the proof with the axes that the factor could come from.

    Args:
        context: The comparison.
        proof: Of a constant factor; changed.
        everywhere: Every tensor of its kind has this factor. A loss or a normaliser does that; a
            reduction done twice has no reason to spare other tensors, so where only some are
            affected, their own reduction is the suspect.
        recipe: How a tensor was put together from its contributions, where they were recorded.
            Contributions that add up to the reference are right, so the reduction is not.
    """
    factor = factor_of(proof)
    sources = [] if factor is None else sources_of(factor, context.sizes)
    sources = [source for source in sources if context.mesh.is_named or "world" not in source]
    whole = factor is not None and abs(factor) > 1 and factor.denominator == 1
    reducing = [source for source in sources if axes_in(source)]
    right_before = None if recipe is None else _are_right(recipe)
    twice = whole and bool(reducing) and (right_before is True or not everywhere)
    if right_before is False:
        twice, reducing = False, []
    if twice:
        proof.cause = DOUBLE_REDUCTION
        sources = reducing
    if len(sources) == 1:
        proof.axes = axes_in(sources[0])
    listed = [candidate(proof.cause, axes_in(s), _meaning(context, s, factor)) for s in sources]
    if whole and reducing and right_before is None:
        other = CONSTANT_FACTOR if twice else DOUBLE_REDUCTION
        listed += [
            candidate(other, axes_in(s), _meaning(context, s, factor, other)) for s in reducing
        ]
    if len(listed) > 1:
        proof.candidates = tuple(listed)
        proof.separate_by = separate_sizes(sources) or (
            "record again with what=(..., 'microbatch_grads'): the sum of what went into the "
            "reduction tells whether it was done twice or was too large before"
        )
    proof.component = "backward" if right_before is False else component_of(sources)
    where = (
        f"The factor is the size of {told_sizes(sources, context.sizes)}."
        if sources
        else "No axis of the mesh has this size."
    )
    proof.text = f"{where} {_ADVICE}"


def _are_right(recipe: Recipe) -> bool | None:
    """Whether contributions add up to the reference; None if they are some other multiple."""
    if all(abs(weight - 1.0) <= _ONE for weight in recipe.right):
        return True
    made = [weight for weights in recipe.made.values() for weight in weights]
    return False if all(abs(weight - 1.0) <= _ONE for weight in made) else None


def component_of(sources: Sequence[Sequence[str]]) -> str:
    """Return ``reduction`` where a factor could come from an axis, else ``backward``."""
    return "reduction" if any(axes_in(source) for source in sources) else "backward"


def _meaning(
    context: Context,
    source: Sequence[str],
    factor: Fraction | None,
    cause: str = CONSTANT_FACTOR,
) -> str:
    sizes = told_sizes([source], context.sizes)
    if cause == DOUBLE_REDUCTION:
        return f"summed twice, {sizes}"
    if factor is not None and abs(factor) < 1:
        return f"divided by {sizes} once too often"
    return f"multiplied by {sizes} once too often"
