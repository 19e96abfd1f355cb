"""Explain the gradients of a step: every hypothesis on every tensor, then one finding per cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paralign.align.explain.context import Context
from paralign.align.explain.contributions import find_recipe, prove_recipe
from paralign.align.explain.factors import (
    CONSTANT_FACTOR,
    name_source,
    prove_factor,
    prove_factor_by_rank,
)
from paralign.align.explain.micro_batches import prove_lost_micro_batch
from paralign.align.explain.missing import prove_absent, prove_zeros
from paralign.align.explain.own_parts import experts_of_ranks
from paralign.align.explain.placement import prove_misplaced, prove_permuted_rows
from paralign.align.explain.precision import prove_noise, prove_rounded
from paralign.align.explain.proof import Proof, finding_of
from paralign.align.explain.replicas import (
    MISSING_REDUCTION,
    WRONG_GROUP,
    differing_replicas,
    prove_missing_reduction,
)
from paralign.align.explain.single import on_one_rank, single_finding
from paralign.align.explain.stale import prove_stale
from paralign.align.explain.unknown import unknown_finding
from paralign.align.judge import Compared
from paralign.align.verdict import Finding

Hypothesis = Callable[[Context, Compared], Proof | None]

# Cheap and specific first. A later one is only asked where no earlier one holds.
HYPOTHESES: tuple[Hypothesis, ...] = (
    prove_absent,
    prove_factor,
    prove_missing_reduction,
    prove_recipe,
    prove_lost_micro_batch,
    prove_stale,
    prove_factor_by_rank,
    prove_misplaced,
    prove_zeros,
    prove_permuted_rows,
    prove_rounded,
)

_PATIENCE = 24
_PATIENCE_DOWNSTREAM = 4

_REDUCING = {MISSING_REDUCTION, WRONG_GROUP}


def explain_gradients(context: Context, kind: str, step: int) -> list[Finding]:
    """Explain the gradients that are out of budget at ``step``."""
    # Backward order: what goes wrong in the loss or in a layer goes on to those before it.
    failing = context.failing(kind, step)[::-1]
    if not failing:
        return []
    gated = [item for item in context.judged(kind, step) if item.row.budget_eps is not None]
    hypotheses = HYPOTHESES
    if any(finding.component == "data" for finding in context.found):
        # Other samples are other contributions: that some are missing says nothing new.
        hypotheses = tuple(h for h in HYPOTHESES if h is not prove_recipe)
    groups, unknown = group_proofs(context, failing, hypotheses)
    # What larger tensors taught of how gradients are put together may explain small ones.
    again = (prove_recipe,) if context.recipes else ()
    more, unknown = group_proofs(context, unknown, again)
    for key, proven in more.items():
        groups.setdefault(key, []).extend(proven)
    if not groups and not context.upstream:  # what is proven explains small errors around it
        groups, unknown = group_proofs(context, unknown, (prove_noise,))
    if context.upstream:
        more, unknown = group_proofs(context, unknown, (differing_replicas,))
        groups |= more
    findings = [
        finding
        for proven in _peel_axes(list(groups.values()))
        for finding in _findings(context, proven, len(gated))
    ]
    if unknown and not context.upstream:
        findings.append(unknown_finding(context, unknown, "backward", alone=not findings))
    return findings


def group_proofs(
    context: Context, items: Sequence[Compared], hypotheses: Sequence[Hypothesis]
) -> tuple[dict[tuple[object, ...], list[tuple[Compared, Proof]]], list[Compared]]:
    """Return proven tensors by the key of their proof, and those that nothing explains.

    A hypothesis that held for none of the first few tensors is not asked again, the sooner if
    something before explains them: trying everything on everything would take longer than the
    comparison did.
    """
    patience = _PATIENCE_DOWNSTREAM if context.upstream else _PATIENCE
    misses: dict[Hypothesis, int] = {}
    groups: dict[tuple[object, ...], list[tuple[Compared, Proof]]] = {}
    unknown = []
    for item in items:
        proof = None
        for hypothesis in hypotheses:
            missed = misses.get(hypothesis, 0)
            if missed >= patience:
                continue
            proof = hypothesis(context, item)
            if proof is not None:
                misses[hypothesis] = -len(items)  # it holds here, so it is always asked
                break
            misses[hypothesis] = missed + 1
        if proof is None:
            unknown.append(item)
        else:
            groups.setdefault(proof.key, []).append((item, proof))
    return groups, unknown


def _findings(
    context: Context, proven: list[tuple[Compared, Proof]], num_gated: int
) -> list[Finding]:
    proof = proven[0][1]
    if proof.cause == CONSTANT_FACTOR and "factor" in proof.detail:
        everywhere = len(proven) == num_gated and "ranks" not in proof.detail
        largest = max((item for item, _ in proven), key=lambda item: math.prod(item.base.shape))
        recipe = find_recipe(context, largest)  # a small one has too few elements to tell
        tied = any(item.row.name in context.tied for item, _ in proven)
        experts = _are_the_experts(context, proven, num_gated)
        for _, each in proven:
            name_source(
                context, each, everywhere=everywhere, recipe=recipe, tied=tied, experts=experts
            )
    if on_one_rank(context, proven):
        return [single_finding(context, proven, "backward")]
    component = "reduction" if proof.cause in _REDUCING else "backward"
    return [finding_of(proven, component, told(proven))]


def _are_the_experts(
    context: Context, proven: Sequence[tuple[Compared, Proof]], num_gated: int
) -> bool:
    """Whether the tensors are all that ep cuts, and nothing else."""
    moment = proven[0][0].moment
    cut = {
        item.row.name
        for item in context.judged(moment.kind, moment.step)
        if experts_of_ranks(context, item.row.name.rpartition(".")[0])
    }
    return len(cut) < num_gated and cut == {item.row.name for item, _ in proven}


def _peel_axes(
    groups: list[list[tuple[Compared, Proof]]],
) -> list[list[tuple[Compared, Proof]]]:
    """Take what many tensors lack out of what a few lack besides.

    Where all gradients miss the sum over cp and those of the head miss the sum over dp as well,
    there are two causes: one reduction over cp, and one over dp for the head.
    """
    missing = [group for group in groups if group[0][1].cause == MISSING_REDUCTION]
    missing.sort(key=len, reverse=True)
    for few in missing:
        for many in missing:
            wide, narrow = set(few[0][1].axes), set(many[0][1].axes)
            if many is not few and narrow < wide and len(many) >= len(few):
                rest = tuple(axis for axis in few[0][1].axes if axis not in narrow)
                over, besides = " x ".join(rest), " x ".join(many[0][1].axes)
                for _, proof in few:
                    proof.detail["also_missing"] = sorted(narrow)
                    proof.axes = rest
                    proof.text = (
                        f"Besides the sum over {besides}, these lack the one over {over}: check "
                        f"that the unit or group that reduces them over {over} holds them."
                    )
                break
    return sorted(groups, key=len, reverse=True)


def told(proven: Sequence[tuple[Compared, Proof]]) -> str:
    """Say in a sentence which tensors a finding is about and how far they are off."""
    worst, proof = max(proven, key=lambda pair: pair[0].row.strain)
    kind = worst.moment.kind
    count = len(proven)
    which = f"{count} {kind} tensors" if count > 1 else f"{kind} {worst.row.label}"
    factor = proof.detail.get("factor")
    if proof.cause in ("constant_factor", "double_reduction") and factor is not None:
        verb = "are" if count > 1 else "is"
        return f"{which} {verb} {factor} times the reference's, to the last digits."
    return f"{which} off at step {worst.row.step}, worst {worst.row.label}."
