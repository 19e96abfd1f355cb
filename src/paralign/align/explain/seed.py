"""A factor in all gradients that the backward pass begins with: the loss was scaled, not a sum.

What is reported may be right nevertheless. A reduction that averages leaves the gradients of module
outputs as they are; a loss that is divided once too often divides the very first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from paralign.align.explain.candidates import (
    Candidate,
    axes_in,
    separate_sizes,
    sources_of,
    told_sizes,
)
from paralign.align.explain.context import Context
from paralign.align.explain.expert_parts import CHOICES
from paralign.align.explain.factors import CONSTANT_FACTOR, factor_of, prove_factor
from paralign.align.explain.losses import TOKEN_WEIGHTING, divided_by_all, valid_and_all
from paralign.align.explain.proof import finding_of
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_SCALED = (CONSTANT_FACTOR, "double_reduction")


def from_the_loss(context: Context, step: int, gradients: Sequence[Finding]) -> list[Finding]:
    """Return one finding about the loss, where its factor explains those about gradients.

    A loss that balances experts joins the backward pass later and need not be scaled: gradients
    before that place are then no multiples of the reference's.

    Args:
        context: The comparison.
        step: The step, whose loss was reported right.
        gradients: What parameters' gradients say by themselves.
    """
    outputs = context.judged(Kind.OUTPUT_GRAD, step)
    kept = list(gradients)
    scaled = [finding for finding in kept if finding.cause in _SCALED]
    has_routers = any(item.row.name.endswith(CHOICES) for item in context.judged(Kind.OUTPUT, step))
    if not scaled or (len(kept) > 1 and not has_routers) or not outputs or outputs[0].row.ok:
        return kept
    first, factor = outputs[0], scaled[0].evidence.get("factor")
    proof = prove_factor(context, first)
    if proof is None or str(proof.detail["factor"]) != str(factor):
        return kept
    counted = valid_and_all(context, step)
    if counted is not None and math.isclose(_number(factor), counted[0] / counted[1]):
        proof.component, proof.cause = "loss", TOKEN_WEIGHTING
        proof.text = f"The backward pass begins with it. {divided_by_all(*counted)}"
        return [finding_of([(first, proof)], "loss", f"The gradient of {first.row.name} is off.")]
    named = factor_of(proof)
    sources = [] if named is None else sources_of(named, context.sizes)
    sources = [source for source in sources if context.mesh.is_named or "world" not in source]
    proof.component = "loss"
    if len(sources) == 1:
        proof.axes = axes_in(sources[0])
    elif sources:
        proof.candidates = tuple(
            str(
                Candidate(
                    "loss", CONSTANT_FACTOR, axes_in(source), told_sizes([source], context.sizes)
                )
            )
            for source in sources
        )
        proof.separate_by = separate_sizes(sources)
    sized = f", the size of {told_sizes(sources, context.sizes)}" if sources else ""
    proof.text = (
        f"The backward pass begins with it: the loss that is minimised is {factor} times what is "
        f"reported{sized}. Divide the sum of token losses once, by the valid tokens of the global "
        f"batch. {scaled[0].evidence.get('tensors')} gradients have the same factor."
    )
    return [finding_of([(first, proof)], "loss", f"The gradient of {first.row.name} is off.")]


def _number(factor: object) -> float:
    """Return a factor that is told as a fraction or a decimal."""
    return float(Fraction(str(factor)))
