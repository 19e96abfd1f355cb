"""Gradients that are None, not finite or all zero where the optimizer is about to use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from paralign.align.inspect.replicas import describe_ranks
from paralign.align.inspect.report import Check
from paralign.align.inspect.view import Held, View
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_NAMES_SHOWN = 8
# An element of an ordinary gradient is zero by chance only; rows of an embedding are zero for every
# token that did not occur. Below this share the other pieces' zeros are of the first kind.
_CHANCE_OF_ZERO = 0.01


def check_gradients(view: View) -> Check:
    """Look at every gradient of every trainable parameter, up to the first step that is wrong."""
    check = Check("gradients")
    for step in view.steps:
        gradients = {
            name: [piece for piece in held if piece.entry.trainable]
            for name, held in view.tensors(Kind.GRAD, step).items()
        }
        gradients = {name: held for name, held in gradients.items() if held}
        check.looked_at += len(gradients)
        check.findings += [
            *_not_finite(view, step, gradients),
            *_missing(view, step, gradients),
            *_missing_on_some(view, step, gradients),
            *_zero(view, step, gradients, check),
            *_zero_on_some(view, step, gradients),
        ]
        if check.findings:
            break
    if not check.looked_at:
        check.why_not = "no gradients were recorded"
    return check


def _not_finite(
    view: View, step: int, gradients: Mapping[str, Sequence[Held]]
) -> Iterator[Finding]:
    bad: dict[str, set[int]] = {}
    for name, held in gradients.items():
        for piece in held:
            if piece.entry.file is not None and view.fingerprint(piece).nonfinite:
                bad.setdefault(name, set()).add(piece.rank)
    if not bad:
        return
    ranks = sorted(set().union(*bad.values()))
    everywhere = len(bad) == len(gradients)
    yield Finding(
        component="backward",
        cause="precision" if view.dtype in ("float16", "bfloat16") else "unknown",
        tensor=next(iter(bad)),
        axes=_axes(view, gradients, bad),
        evidence=_evidence(step, list(bad), ranks),
        fix=f"{_count(bad, gradients)} have NaN or infinite elements on {describe_ranks(ranks)}. "
        + (
            "All have: look at the loss first (a mean over no tokens, an overflow)."
            if everywhere
            else "The others are finite: look at the modules that own these."
        ),
        where=view.where(next(iter(bad))),
    )


def _missing(view: View, step: int, gradients: Mapping[str, Sequence[Held]]) -> Iterator[Finding]:
    gone = [
        name
        for name, held in gradients.items()
        if all(piece.entry.file is None for piece in held) and not view.may_be_unused(name)
    ]
    if not gone:
        return
    everything = len(gone) == len(gradients)
    yield Finding(
        component="backward",
        cause="missing_contribution",
        tensor=gone[0],
        evidence=_evidence(step, gone, []),
        fix=f"{_count(gone, gradients)} have no gradient (None) on any rank when the optimizer is "
        "about to step. "
        + (
            "None has one: was the backward run, and not followed by zero_grad()?"
            if everything
            else "Look for a detached output or a branch that is not taken. If the model does not "
            "use them, freeze them, or say so: unused=[...]."
        ),
        where=view.where(gone[0]),
    )


def _missing_on_some(
    view: View, step: int, gradients: Mapping[str, Sequence[Held]]
) -> Iterator[Finding]:
    partly: dict[str, set[int]] = {}
    for name, held in gradients.items():
        without = {piece.rank for piece in held if piece.entry.file is None}
        if without and len(without) < len({piece.rank for piece in held}):
            partly[name] = without
    if not partly:
        return
    ranks = sorted(set().union(*partly.values()))
    first = next(iter(partly))
    yield Finding(
        component="reduction",
        cause="missing_contribution",
        tensor=first,
        axes=_axes(view, gradients, partly),
        evidence=_evidence(step, list(partly), ranks),
        fix=f"{_count(partly, gradients)} have a gradient on some ranks and None on "
        f"{describe_ranks(ranks)}. A rank that did not use a parameter must still take part in its "
        "reduction, and receive the sum.",
        where=view.where(first),
    )


def _zero(
    view: View, step: int, gradients: Mapping[str, Sequence[Held]], check: Check
) -> Iterator[Finding]:
    zero = []
    for name, held in gradients.items():
        prints = [view.fingerprint(piece) for piece in held if piece.entry.file is not None]
        if not any(found.elements for found in prints) or view.may_be_unused(name):
            continue
        if all(found.is_zero for found in prints if found.elements):
            if _is_of_experts(name):
                check.notes.append(
                    f"the gradient of {name} is zero at step {step}: an expert without tokens?"
                )
            else:
                zero.append(name)
    if not zero:
        return
    yield Finding(
        component="backward",
        cause="missing_contribution",
        tensor=zero[0],
        evidence=_evidence(step, zero, []),
        fix=f"{_count(zero, gradients)} have a gradient that is exactly zero on every rank. Look "
        "for a detached output, a mask that hides everything, gradients zeroed before the step, or "
        "a stage whose backward did not run.",
        where=view.where(zero[0]),
    )


def _zero_on_some(
    view: View, step: int, gradients: Mapping[str, Sequence[Held]]
) -> Iterator[Finding]:
    """Find shards that are all zero although the other shards' elements are not by the way."""
    partly: dict[str, set[int]] = {}
    for name, held in gradients.items():
        if _is_of_experts(name):
            continue
        prints = {p.rank: view.fingerprint(p) for p in held if p.entry.file is not None}
        empty = {rank for rank, found in prints.items() if found.is_zero and found.elements > 1}
        rest = [found for rank, found in prints.items() if rank not in empty and found.elements]
        zeros = sum(found.zeros for found in rest)
        if empty and rest and zeros <= _CHANCE_OF_ZERO * sum(found.elements for found in rest):
            partly[name] = empty
    if not partly:
        return
    ranks = sorted(set().union(*partly.values()))
    first = next(iter(partly))
    yield Finding(
        component="reduction",
        cause="missing_contribution",
        tensor=first,
        axes=_axes(view, gradients, partly),
        evidence=_evidence(step, list(partly), ranks),
        fix=f"{_count(partly, gradients)} have a gradient whose part on {describe_ranks(ranks)} is "
        "exactly zero, while the other parts have hardly a zero in them. It was not computed, or "
        "its reduction wrote elsewhere.",
        where=view.where(first),
    )


def _axes(
    view: View, gradients: Mapping[str, Sequence[Held]], bad: Mapping[str, set[int]]
) -> list[str]:
    """Return the axes along which some holders of a tensor are bad and others are not."""
    axes: list[str] = []
    for name, ranks in bad.items():
        said = {piece.rank: piece.rank in ranks for piece in gradients[name]}
        split = view.split(said, gradients[name][0].entry.replicated_over)
        axes += split.axes if split else ()
    return list(dict.fromkeys(axes))


def _evidence(step: int, names: Sequence[str], ranks: Sequence[int]) -> dict[str, object]:
    return {
        "step": step,
        "parameters": len(names),
        "names": list(names[:_NAMES_SHOWN]),
        "ranks": list(ranks),
    }


def _count(some: Sequence[str] | Mapping[str, object], everything: Mapping[str, object]) -> str:
    return f"{len(some)} of {len(everything)} parameters"


def _is_of_experts(name: str) -> bool:
    return "expert" in name.lower()
