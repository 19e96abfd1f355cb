"""Replicas that disagree: one parameter, gradient or moment, held twice and not the same."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paralign.align.inspect.factors import simple_factor
from paralign.align.inspect.fingerprint import distance, relative_to
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import Held, Split, View
from paralign.align.scalars import step_norms
from paralign.align.trace import Kind, TensorEntry
from paralign.align.verdict import Finding

_NAMES_SHOWN = 8
_COMPONENT = {
    Kind.PARAM: "weights",
    Kind.GRAD: "reduction",
    Kind.MOMENT: "state",
    Kind.PARAM_AFTER: "optimizer",
}
_WORDS = {
    Kind.PARAM: "initial weights",
    Kind.GRAD: "gradients",
    Kind.MOMENT: "optimizer states",
    Kind.PARAM_AFTER: "parameters after the step",
}


@dataclass
class _Disagreement:
    """Names whose replicas fall apart in the same way."""

    kind: str
    step: int
    state: str | None
    cause: str
    split: Split
    factor: float | None
    names: list[str] = field(default_factory=list)
    worst: float = 0.0


def check_replicas(view: View) -> Check:
    """Hold every piece against the other ranks' copies of it, in causal order.

    What follows from an earlier disagreement is not reported again: later kinds of the same
    parameter, everything that a norm which differs has scaled, and later steps.
    """
    check = Check("replicas")
    named: set[str] = set()
    for step in view.steps:
        found: list[_Disagreement] = []
        for kind, state in _moments(view, step):
            if kind in (Kind.MOMENT, Kind.PARAM_AFTER) and found and _norms_differ(view, step):
                break
            fresh = _disagreements(view, kind, step, state, named, check)
            if kind == Kind.GRAD:
                fresh = _without_consequences(fresh, found)
            found += fresh
            named |= {name for item in fresh for name in item.names}
        check.findings += [_finding(view, item) for item in found]
        if found:
            break
    if not check.looked_at:
        check.why_not = "no two ranks hold the same piece of a parameter"
    return check


def _moments(view: View, step: int) -> Iterator[tuple[str, str | None]]:
    if step == view.steps[0]:
        yield Kind.PARAM, None
    yield Kind.GRAD, None
    for state in view.states(step):
        yield Kind.MOMENT, state
    yield Kind.PARAM_AFTER, None


def _norms_differ(view: View, step: int) -> bool:
    return len(set(step_norms(view.reader, step))) > 1


def _without_consequences(
    gradients: list[_Disagreement], found: Sequence[_Disagreement]
) -> list[_Disagreement]:
    """Drop gradients that differ along axes along which the weights differed already."""
    explained = {axis for item in found for axis in item.split.axes}
    return [item for item in gradients if not (found and set(item.split.axes) <= explained)]


def _disagreements(
    view: View, kind: str, step: int, state: str | None, known: set[str], check: Check
) -> list[_Disagreement]:
    groups: dict[tuple[Hashable, ...], _Disagreement] = {}
    for name, held in view.tensors(kind, step, state).items():
        if name in known or (kind != Kind.PARAM and name in view.noise_names(step)):
            continue
        for replicas in replica_groups(held):
            check.looked_at += 1
            item = _disagreement(view, kind, step, state, replicas, check)
            if item is None:
                continue
            key = (item.cause, item.split.axes, item.split.loners, item.factor)
            group = groups.setdefault(key, item)
            group.worst = max(group.worst, item.worst)
            if name not in group.names:
                group.names.append(name)
    return list(groups.values())


def replica_groups(held: Iterable[Held]) -> list[list[Held]]:
    """Return the pieces that are copies of each other: of the same place, and no summands."""
    by_place: dict[Hashable, list[Held]] = {}
    for piece in held:
        if piece.entry.file is not None and not piece.entry.partial_over:
            by_place.setdefault(piece.place, []).append(piece)
    return [copies for copies in by_place.values() if len({piece.rank for piece in copies}) > 1]


def copies_agree(view: View, held: Iterable[Held]) -> bool:
    """Whether all copies of a tensor's pieces have the same norm, up to rounding."""
    limit = view.scalar_tolerance("norm")
    for copies in replica_groups(held):
        norms = [view.fingerprint(piece).norm for piece in copies]
        if not max(norms) - min(norms) <= limit * max(norms):
            return False
    return True


def _disagreement(
    view: View,
    kind: str,
    step: int,
    state: str | None,
    replicas: Sequence[Held],
    check: Check,
) -> _Disagreement | None:
    prints = {piece.rank: view.fingerprint(piece) for piece in replicas}
    digests = {rank: found.digest for rank, found in prints.items()}
    if len(set(digests.values())) == 1:
        return None
    if any(found.nonfinite for found in prints.values()):
        return None  # said where NaN is looked for
    entries = {piece.rank: piece.entry for piece in replicas}
    by_value = _merge_rounding(view, entries, digests, kind, step)
    prefer = replicas[0].entry.replicated_over
    split = view.split(by_value, prefer)
    if split is None:
        note = (
            f"replicas of {_WORDS[kind]} differ in their last bits, as another order of sums does "
            f"(step {step})"
        )
        if note not in check.notes:
            check.notes.append(note)
        return None
    base, other = entries[split.classes[0][0]], entries[split.classes[1][0]]
    relative, ratio = distance(view.reader, other, base)
    factor = _factor(view, other, base, ratio) if kind == Kind.GRAD else None
    cause = _cause(view, kind, step, split, factor, replicas)
    return _Disagreement(
        kind, step, state, cause, split, factor, [], relative if math.isfinite(relative) else 1.0
    )


def _merge_rounding(
    view: View,
    entries: dict[int, TensorEntry],
    digests: dict[int, bytes],
    kind: str,
    step: int,
) -> dict[int, int]:
    """Return a class number per rank; ranks whose values are equal up to rounding share one."""
    after = kind == Kind.PARAM_AFTER or kind == Kind.MOMENT or step > view.steps[0]
    limit = 0.0 if kind == Kind.PARAM else view.tolerance(after_step=after)
    numbers: dict[bytes, int] = {}
    bases: list[int] = []
    for rank, digest in sorted(digests.items()):
        if digest in numbers:
            continue
        for number, base in enumerate(bases):
            relative, _ = distance(view.reader, entries[rank], entries[base])
            if relative <= limit:
                numbers[digest] = number
                break
        else:
            numbers[digest] = len(bases)
            bases.append(rank)
    return {rank: numbers[digest] for rank, digest in digests.items()}


def _factor(view: View, other: TensorEntry, base: TensorEntry, ratio: float) -> float | None:
    """Return the factor between two replicas, if nothing else is left between them."""
    found = simple_factor(ratio, tolerance=1e-2)
    if found is None:
        return None
    left = relative_to(view.reader, other, base, float(found))
    return float(found) if left <= view.tolerance(after_step=False) else None


def _cause(
    view: View,
    kind: str,
    step: int,
    split: Split,
    factor: float | None,
    replicas: Sequence[Held],
) -> str:
    if kind == Kind.PARAM:
        return "single_rank" if split.loners else "rng"
    if kind == Kind.PARAM_AFTER and _did_not_move(view, step, replicas):
        return "stale"
    if factor is not None:
        return "constant_factor"
    if split.loners:
        return "single_rank"
    if kind == Kind.GRAD:
        return "wrong_group" if _in_subgroups(view, split) else "missing_reduction"
    return "unknown"


def _in_subgroups(view: View, split: Split) -> bool:
    """Whether ranks along the one differing axis agree in groups smaller than the axis."""
    if len(split.axes) != 1:
        return False
    classes = [set(ranks) for ranks in split.classes]
    group = set(view.group(split.classes[0][0], split.axes[0]))
    return all(len(ranks & group) != 1 for ranks in classes)


def _did_not_move(view: View, step: int, replicas: Sequence[Held]) -> set[int]:
    """Return the ranks whose copy is bitwise what it was before the step, if others moved."""
    name = replicas[0].entry.name
    before = {(piece.rank, piece.place): piece for piece in view.before(step).get(name, [])}
    still = set()
    for piece in replicas:
        earlier = before.get((piece.rank, piece.place))
        if earlier is not None and earlier.entry.file is not None:
            same = view.fingerprint(earlier).digest == view.fingerprint(piece).digest
            still |= {piece.rank} if same else set()
    return still if len(still) < len({piece.rank for piece in replicas}) else set()


def _finding(view: View, item: _Disagreement) -> Finding:
    count, what = len(item.names), _WORDS[item.kind]
    over = f" over {', '.join(item.split.axes)}" if item.split.axes else ""
    classes = "; ".join(describe_ranks(ranks) for ranks in item.split.classes[:4])
    more = "; ..." if len(item.split.classes) > 4 else ""
    told = (
        f"{count} parameters have {what} that differ between replicas{over} "
        f"(equal within: {classes}{more}). "
    )
    return Finding(
        component=_COMPONENT[item.kind],
        cause=item.cause,
        tensor=item.names[0] + (f" [{item.state}]" if item.state else ""),
        axes=list(item.split.axes),
        evidence={
            "step": item.step,
            "kind": item.kind,
            "parameters": count,
            "names": item.names[:_NAMES_SHOWN],
            "rel_l2": item.worst,
            "factor": item.factor,
            "ranks": list(item.split.loners),
            "classes": [list(ranks) for ranks in item.split.classes],
        },
        fix=told + _advice(item),
        where=view.where(item.names[0]),
    )


def _advice(item: _Disagreement) -> str:
    axes = ", ".join(item.split.axes) or "these ranks"
    if item.cause == "single_rank":
        return f"Only rank {', '.join(map(str, item.split.loners))} is off: look at what it did."
    if item.cause == "stale":
        return "Some ranks still hold what they had before the step: gather the new values there."
    if item.kind == Kind.PARAM:
        return (
            f"Seed every rank of {axes} alike, or broadcast from one of them before training. If "
            "they are shards or other layers, tell the recorder: shards={...} or names={...}."
        )
    if item.kind == Kind.GRAD:
        if item.cause == "constant_factor":
            return f"They are exactly {item.factor:g} times each other: scale on all ranks alike."
        if item.cause == "wrong_group":
            return f"They were reduced within parts of {axes} only: reduce over all of {axes}."
        return f"Reduce them over {axes} before the optimizer steps."
    return "The gradients agree, so look at the optimizer: its options, order and clipping."


def describe_ranks(ranks: Sequence[int]) -> str:
    """Write ranks shortly: ``rank 0, 2, ...``."""
    return "rank " + ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
