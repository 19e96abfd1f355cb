"""Read what the weights of contributions mean.

They tell which ranks and micro-batches were left out, counted twice, or weighed by something else
than their tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from paralign.align.explain.candidates import Candidate
from paralign.align.explain.context import NUM_MICROBATCHES, Context, Label, Recipe
from paralign.align.explain.proof import Proof
from paralign.align.judge import Compared

MISSING_CONTRIBUTION = "missing_contribution"
MISSING_REDUCTION = "missing_reduction"
WRONG_GROUP = "wrong_group"
TOKEN_WEIGHTING = "token_weighting"
CONSTANT_FACTOR = "constant_factor"
DOUBLE_REDUCTION = "double_reduction"
SINGLE_RANK = "single_rank"

_SAME = 1e-6


def read_weights(context: Context, item: Compared, recipe: Recipe) -> Proof | None:
    """Return the cause that the weights show; None where they show none that is known."""
    recipe = recipe.of_its_own()
    relative = _relative(recipe)
    if relative is None or not recipe.labels:
        return None
    for read in (_left_out, _by_tokens, _one_rank, _by_micro_batch):
        proof = read(context, recipe, relative)
        if proof is not None:
            proof.left = recipe.left
            return proof
    return None


def _relative(recipe: Recipe) -> dict[int, dict[Label, float]] | None:
    """Return per rank the weight of each contribution, where 1 is right."""
    if any(abs(weight) < _SAME for weight in recipe.right):
        return None
    return {
        rank: {
            label: made / right
            for label, made, right in zip(recipe.labels, weights, recipe.right, strict=True)
        }
        for rank, weights in recipe.made.items()
    }


def _left_out(
    context: Context, recipe: Recipe, relative: Mapping[int, Mapping[Label, float]]
) -> Proof | None:
    """All contributions count once (or all the same number of times), but some not at all."""
    kept = {
        round(w, 6) for weights in relative.values() for w in weights.values() if abs(w) > _SAME
    }
    gone = {
        rank: {label for label, w in weights.items() if abs(w) <= _SAME}
        for rank, weights in relative.items()
    }
    if not any(gone.values()) or len(kept) != 1:
        return None
    times = kept.pop()
    everyone = {label.rank for label in recipe.labels}
    numbers = {label.micro_batch for label in recipe.labels}
    known = set(recipe.labels)
    whole_ranks = {
        rank: {r for r in everyone if all(Label(r, m) in lost | unknown for m in numbers)}
        for rank, lost in gone.items()
        for unknown in [{Label(r, m) for r in everyone for m in numbers} - known]
    }
    if all(
        lost
        == {Label(r, m) for r in whole_ranks[rank] for m in numbers if Label(r, m) in recipe.labels}
        for rank, lost in gone.items()
    ):
        return _groups(context, everyone, whole_ranks, times)
    return _micro_batches(context, gone, times)


def _groups(
    context: Context,
    everyone: set[int],
    lost: Mapping[int, set[int]],
    times: float,
) -> Proof:
    """Whole ranks are missing: the reduction went over another group."""
    used = {rank: tuple(sorted(everyone - away)) for rank, away in lost.items()}
    always = set.intersection(*lost.values())
    if always and all(away == always for away in lost.values()):
        return _never_arrive(context, everyone, always, times)
    right_axes = context.mesh.axes_of(sorted(everyone))
    for axes in [(), *context.mesh.subsets()]:
        if all(
            set(group) == set(context.mesh.peers(rank, axes)) & everyone
            for rank, group in used.items()
        ):
            missing = tuple(axis for axis in right_axes if axis not in axes)
            return _missing(context, missing, axes, times)
    shown = sorted({group for group in used.values()})
    return Proof(
        WRONG_GROUP,
        math.nan,
        tuple(context.mesh.named(right_axes)),
        component="reduction",
        key=(WRONG_GROUP, tuple(shown)),
        detail={"groups": [list(group) for group in shown]},
        text=f"It holds the contributions of the groups {[list(g) for g in shown]}, which are no "
        f"group of the mesh; all of {sorted(everyone)} belong in. Build the group from the mesh.",
    )


def _never_arrive(context: Context, everyone: set[int], away: set[int], times: float) -> Proof:
    """The same ranks' contributions are missing everywhere, also on these ranks themselves."""
    axes = tuple(
        context.mesh.named(context.mesh.coordinates_that_tell(sorted(away), sorted(everyone)))
    )
    told = ", ".join(map(str, sorted(away)))
    return Proof(
        MISSING_CONTRIBUTION,
        math.nan,
        axes,
        component="reduction",
        key=(MISSING_CONTRIBUTION, axes, tuple(sorted(away)), round(times, 6)),
        detail={"ranks": sorted(away), "times": times},
        text=f"What rank {told} computed is in nobody's sum: it was not ready, or cleared, when it "
        "was reduced. Reduce after the last backward, and wait for it.",
    )


def _missing(
    context: Context, missing: tuple[str, ...], used: tuple[str, ...], times: float
) -> Proof:
    over = " x ".join(missing) or "all ranks"
    wrong = times > 1 + _SAME
    cause = WRONG_GROUP if wrong else MISSING_REDUCTION
    also = (
        f" and every contribution that did counts {times:g} times, as if the sum over "
        f"{' x '.join(used)} was taken twice"
        if wrong and used
        else ""
    )
    return Proof(
        cause,
        math.nan,
        tuple(context.mesh.named(missing)),
        component="reduction",
        key=(cause, missing, round(times, 6)),
        detail={"operation": "sum", "times": times},
        text=f"The contributions of the other ranks along {over} never arrived{also}: reduce the "
        f"gradient over {over}.",
    )


def _micro_batches(context: Context, gone: Mapping[int, set[Label]], times: float) -> Proof | None:
    numbers = sorted({label.micro_batch for lost in gone.values() for label in lost})
    ranks = sorted({label.rank for lost in gone.values() for label in lost})
    axes = context.mesh.axes_of(ranks)
    own = all(label.rank != rank for rank, lost in gone.items() for label in lost)
    told = ", ".join(map(str, numbers))
    whose = (
        "of the other ranks" if own and len(gone) > 1 else f"on rank {', '.join(map(str, ranks))}"
    )
    return Proof(
        MISSING_CONTRIBUTION,
        math.nan,
        tuple(context.mesh.named(axes)) if own and len(gone) > 1 else (),
        component="backward",
        key=(MISSING_CONTRIBUTION, tuple(numbers), own),
        detail={"micro_batches": numbers, "ranks": ranks},
        text=f"Without micro-batch {told} {whose} it is right: that contribution never arrived. "
        "Look for a reduction that runs before the last micro-batch, a gradient that is "
        "overwritten instead of added to, or a forward without gradient.",
        candidates=(),
    )


def _by_tokens(
    context: Context, recipe: Recipe, relative: Mapping[int, Mapping[Label, float]]
) -> Proof | None:
    """Weights that are inverse to the number of tokens: each part's mean counts alike."""
    weights = next(iter(relative.values()))
    if not all(_equal(weights, other) for other in relative.values()):
        return None
    if min(weights.values()) <= 0:
        return None
    for axes in [(), *context.mesh.subsets()]:
        for by_number in (False, True):
            parts = _parts(context, weights, axes, by_number)
            if len(set(map(_rounded, parts.values()))) < 2:
                continue
            # t_i = T / (N w_i) are the token counts; they add up to T if this is what was done.
            # Parts without a token add nothing and are not seen here, but N may count them.
            count = context.mesh.degree(axes)
            count *= context.sizes.get(NUM_MICROBATCHES, 1) if by_number else 1
            share = sum(1.0 / weight for weight in parts.values())
            if any(abs(share / number - 1.0) <= _SAME for number in {len(parts), count}):
                return _mean_of_means(context, axes, by_number, parts)
    return None


def _mean_of_means(
    context: Context, axes: tuple[str, ...], by_number: bool, parts: Mapping[object, float]
) -> Proof:
    level = " of a ".join(
        (["micro-batch"] if by_number else []) + ([f"{' x '.join(axes)} rank"] if axes else [])
    )
    return Proof(
        TOKEN_WEIGHTING,
        math.nan,
        tuple(context.mesh.named(axes)),
        component="loss",
        key=(TOKEN_WEIGHTING, level),
        detail={
            "level": level,
            "token_shares": [1.0 / weight / len(parts) for weight in parts.values()],
        },
        text=f"Every {level} weighs alike, however many tokens it has: a mean of means. "
        "Divide the sum of token losses by the number of valid tokens in the global batch.",
    )


def _parts(
    context: Context, weights: Mapping[Label, float], axes: tuple[str, ...], by_number: bool
) -> dict[object, float]:
    """Return one weight per part, or nothing where a part has several."""
    others = context.mesh.others(axes)

    def part(label: Label) -> object:
        # Ranks that differ along other axes only are one part.
        rank = context.mesh.peers(label.rank, others)[0] if label.rank >= 0 else -1
        return (rank, label.micro_batch) if by_number else rank

    return _merged(weights, part)


def _merged(weights: Mapping[Label, float], key: Callable[[Label], object]) -> dict[object, float]:
    """Return one weight per key, or nothing where the weights of a key differ."""
    found: dict[object, float] = {}
    for label, weight in weights.items():
        at = key(label)
        if at in found and _rounded(found[at]) != _rounded(weight):
            return {}
        found[at] = weight
    return found


def _one_rank(
    context: Context, recipe: Recipe, relative: Mapping[int, Mapping[Label, float]]
) -> Proof | None:
    """One rank's contributions weigh more or less than they should; all others count once."""
    odd = {
        label.rank
        for weights in relative.values()
        for label, weight in weights.items()
        if abs(weight - 1.0) > _SAME
    }
    if len(odd) != 1 or len({label.rank for label in recipe.labels}) < 2:
        return None
    (rank,) = odd
    found = {
        round(weight, 9)
        for weights in relative.values()
        for label, weight in weights.items()
        if label.rank == rank
    }
    shown = sorted(found)
    return Proof(
        SINGLE_RANK,
        math.nan,
        component="backward",
        key=(SINGLE_RANK, rank, tuple(shown)),
        detail={"rank": rank, "weights": shown},
        text=f"The contributions of rank {rank} count {', '.join(f'{w:g}' for w in shown)} times, "
        "all others once. Compare what this rank does alone: its loss scale, its code path.",
        candidates=(
            str(Candidate("backward", SINGLE_RANK, (), f"rank {rank} alone")),
            str(Candidate("backward", CONSTANT_FACTOR, (), "a factor that depends on the rank")),
        ),
        separate_by="run again with the ranks in another order: the factor stays with the machine "
        "or moves with the coordinate",
    )


def _by_micro_batch(
    context: Context, recipe: Recipe, relative: Mapping[int, Mapping[Label, float]]
) -> Proof | None:
    """Every micro-batch has a weight of its own, the same on all ranks: accumulation went wrong."""
    weights = next(iter(relative.values()))
    if not all(_equal(weights, other) for other in relative.values()):
        return None
    by_number = _merged(weights, lambda label: label.micro_batch)
    if len(set(map(_rounded, by_number.values()))) < 2:
        return None
    told = {str(number): weight for number, weight in by_number.items()}
    shown = ", ".join(f"{weight:g}" for weight in by_number.values())
    return Proof(
        CONSTANT_FACTOR,
        math.nan,
        component="backward",
        key=(CONSTANT_FACTOR, "by micro-batch", shown),
        detail={"weights_by_micro_batch": told},
        text=f"The micro-batches count {shown} times, where each should count once. Look for an "
        "accumulated gradient that is scaled, or added to itself, again with every micro-batch.",
    )


def _equal(a: Mapping[Label, float], b: Mapping[Label, float]) -> bool:
    return all(_rounded(a[label]) == _rounded(b[label]) for label in a)


def _rounded(weight: float) -> float:
    return round(weight, 6)
