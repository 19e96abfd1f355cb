"""Hypothesis: a tensor is the reference's times one number.

A mean where a sum belongs, a loss normalised by the wrong count, or a reduction that is done twice
leaves every element right but for a factor. Which of them it was, the factor alone cannot say:
where several axes have the size it needs, all are listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from paralign.align.explain.candidates import (
    Candidate,
    axes_in,
    fraction_factor,
    simple_factor,
    sources_of,
    told_sizes,
)
from paralign.align.explain.context import NUM_MICROBATCHES, Context, Recipe
from paralign.align.explain.proof import (
    Mix,
    Proof,
    error_left,
    left_in_all,
    limit_of,
    proves,
)
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
    context: Context,
    proof: Proof,
    *,
    everywhere: bool,
    recipe: Recipe | None = None,
    tied: bool = False,
    experts: bool = False,
) -> None:
    """Complete the proof with the axes that the factor could come from.

    Args:
        context: The comparison.
        proof: Of a constant factor; changed.
        everywhere: Every tensor of its kind has this factor, as a loss or a normaliser gives it.
            Where only some have it, their own reduction is the first suspect.
        recipe: How a tensor was put together from its contributions, where they were recorded.
            Contributions that add up to the reference are right, so the reduction is not.
        tied: One parameter on several stages: nothing else is reduced over pp.
        experts: All that is cut over ep has the factor, and nothing else. Tokens of all its ranks
            come to an expert, so that nothing is to be reduced over it, once or twice.
    """
    factor = factor_of(proof)
    sources = [] if factor is None else sources_of(factor, context.sizes)
    sources = [source for source in sources if context.mesh.is_named or "world" not in source]
    ep = context.mesh.all_sizes.get("ep", 1)  # also where it is the ranks of other axes together
    if experts and ep > 1 and factor in (ep, Fraction(1, ep)):
        proof.component, proof.axes = "reduction", ("ep",)
        proof.detail["tensors_are"] = "all experts"
        proof.text = (
            f"These are all that ep cuts, and the factor is the size of ep={ep}. "
            "An expert has the tokens of all ranks of ep, so its gradient is their sum already: "
            "scale it like any other."
        )
        return
    whole = factor is not None and abs(factor) > 1 and factor.denominator == 1
    right_before = None if recipe is None else _are_right(recipe)
    reducing = [
        source
        for source in sources
        if axes_in(source) == source and (everywhere or tied or "pp" not in source)
    ]
    listed: list[Candidate] = []
    if right_before is not False:
        # A reduction done twice has no reason to spare other tensors.
        twice = whole and bool(reducing) and (right_before is True or not everywhere)
        causes = [DOUBLE_REDUCTION, CONSTANT_FACTOR] if twice else [CONSTANT_FACTOR]
        if whole and not twice and right_before is None:
            causes.append(DOUBLE_REDUCTION)
        for cause in causes if right_before is None else causes[:1]:
            listed += [_reducing(context, source, factor, cause) for source in reducing]
    if right_before is not True or not listed:
        listed.append(_before_reduction(context, sources, factor))
    elif not everywhere:
        listed.append(_after_reduction(factor))
    proof.component, proof.cause = listed[0].component, listed[0].cause
    places = {(each.component, each.axes) for each in listed}
    if len(places) == 1 or len(reducing) <= 1:
        proof.axes = listed[0].axes
    if len(listed) > 1:
        proof.candidates = tuple(map(str, listed))
        proof.separate_by = _separate(context, sources, len(places) > 1)
    where = (
        f"The factor is the size of {told_sizes(sources, context.sizes)}."
        if sources
        else "No axis of the mesh has this size."
    )
    proof.text = f"{where} {_ADVICE}"


def _reducing(
    context: Context, source: Sequence[str], factor: Fraction | None, cause: str
) -> Candidate:
    """The factor came in where gradients are reduced over an axis."""
    sizes = told_sizes([source], context.sizes)
    if cause == DOUBLE_REDUCTION:
        meaning = f"summed over {sizes} twice"
    elif factor is not None and abs(factor) < 1:
        meaning = f"averaged over {sizes}, where a sum belongs"
    else:
        meaning = f"summed over {sizes}, where a mean belongs"
    return Candidate("reduction", cause, tuple(source), meaning)


def _before_reduction(
    context: Context, sources: Sequence[Sequence[str]], factor: Fraction | None
) -> Candidate:
    """The factor was in what each rank computed."""
    counted = any(NUM_MICROBATCHES in source for source in sources)
    told = f"{NUM_MICROBATCHES}={context.sizes[NUM_MICROBATCHES]}" if counted else "on every rank"
    how = "divided" if factor is not None and abs(factor) < 1 else "multiplied or added again"
    return Candidate("backward", CONSTANT_FACTOR, (), f"{how}, {told}")


def _after_reduction(factor: Fraction | None) -> Candidate:
    """The factor was put on what the reduction returned."""
    how = "divided" if factor is not None and abs(factor) < 1 else "multiplied or added again"
    return Candidate("backward", CONSTANT_FACTOR, (), f"{how} after its reduction")


def _separate(context: Context, sources: Sequence[Sequence[str]], places: bool) -> str:
    """Name the run that tells the sources of a factor apart."""
    names = sorted({name for source in sources for name in source})
    sizes = (
        f"run again with {' and '.join(names)} of sizes that no other has"
        if len(names) > 1
        else f"run again with another size of {names[0]}"
    )
    told = f"{sizes}: the factor follows the guilty one, or stays if it is no axis's"
    if context.sizes and not places:
        return (
            "record again with what=(..., 'microbatch_grads'): the sum of what went into the "
            "reduction tells whether it was done twice or was too large before"
        )
    return told


def _are_right(recipe: Recipe) -> bool | None:
    """Whether contributions add up to the reference; None if they are some other multiple."""
    if all(abs(weight - 1.0) <= _ONE for weight in recipe.right):
        return True
    made = [weight for weights in recipe.made.values() for weight in weights]
    return False if all(abs(weight - 1.0) <= _ONE for weight in made) else None
