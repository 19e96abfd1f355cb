"""Hypothesis: a tensor passed through a narrower dtype than it should have.

A tensor whose every element a narrow dtype can represent, while the reference's are not, was
rounded to it. Where the values only carry the noise of a narrower dtype (computed in it, then
widened), the error is within the budget a run in that dtype would have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paralign.align.budget import EPS, UNCALIBRATED_EPS
from paralign.align.explain.context import Context
from paralign.align.explain.own_parts import experts_of_ranks
from paralign.align.explain.proof import Proof, parts_of, pieces_once
from paralign.align.inspect.feed import role_of
from paralign.align.judge import Compared
from paralign.align.pair import UPDATE
from paralign.align.trace import Kind

PRECISION = "precision"

_NARROW = ("bfloat16", "float16", "float32")
# Sums in a narrow dtype carry noise of about one eps; far from it the dtype is not to blame.
_COMPONENTS = {
    Kind.PARAM: "weights",
    Kind.OUTPUT: "forward",
    Kind.MOMENT: "optimizer",
    UPDATE: "optimizer",
    Kind.PARAM_AFTER: "optimizer",
}
_NOISY = ("bfloat16", "float32")
_LEAST_NOISE, _MOST_NOISE = 0.02, 4.0
_NEARLY_ALL = 0.99
_REDUCING = ("dp", "cp")


def prove_precision(context: Context, item: Compared) -> Proof | None:
    """Return the proof that ``item`` was rounded to, or computed in, a narrower dtype."""
    return prove_rounded(context, item) or prove_noise(context, item)


def prove_rounded(context: Context, item: Compared) -> Proof | None:
    """Return the proof that every element of ``item`` is one that a narrower dtype has."""
    before = item.measured.total.relative
    for dtype in _narrow(context):
        if before <= UNCALIBRATED_EPS[dtype].value * EPS[dtype] and _is_representable(item, dtype):
            noise = before / EPS[dtype]
            if item.moment.kind == Kind.GRAD and not _is_rounded_once(item, dtype):
                return _proof_of_sums(context, item, dtype, noise)
            return _proof(dtype, noise, True, _component(item))
    return None


def prove_noise(context: Context, item: Compared) -> Proof | None:
    """Say that the error is as large as that of a run in a narrower dtype; a candidate, no proof.

    Any small mistake may be of that size, so this is only asked where nothing else holds.
    """
    before = item.measured.total.relative
    if item.moment.kind == Kind.PARAM:
        return None  # nothing computes initial weights, so they carry no noise
    if item.moment.step > min(context.steps) and item.moment.kind != Kind.MOMENT:
        return None  # the step before was right, and a narrow dtype would have shown in it
    for dtype in _NOISY:
        noise = before / EPS[dtype]
        if dtype in _narrow(context) and _LEAST_NOISE <= noise <= _MOST_NOISE:
            return _proof(dtype, noise, False, _component(item))
    return None


def _narrow(context: Context) -> list[str]:
    return [dtype for dtype in _NARROW if EPS[dtype] > context.budget.eps * 1.5]


def _component(item: Compared) -> str:
    return _COMPONENTS.get(item.moment.kind, "backward")


def _is_representable(item: Compared, dtype: str) -> bool:
    """Whether every element fits ``dtype`` exactly, and the reference's do not."""
    target = getattr(torch, dtype)
    fits = all(
        _fits(piece.read(box), target) for piece in pieces_once(item) for box in parts_of(piece)
    )
    if not fits:
        return False
    return not all(
        _fits(item.base.fetch(box), target)
        for piece in pieces_once(item)
        for box in parts_of(piece)
    )


def _is_rounded_once(item: Compared, dtype: str) -> bool:
    """Whether nearly every element is the reference's, rounded; sums of rounded parts are not."""
    target = getattr(torch, dtype)
    same = elements = 0
    for piece in pieces_once(item):
        for box in parts_of(piece):
            due = item.base.fetch(box).to(target).to(torch.float64)
            same += int((piece.read(box) == due).sum())
            elements += due.numel()
    return same >= _NEARLY_ALL * elements


def _proof_of_sums(context: Context, item: Compared, dtype: str, noise: float) -> Proof:
    """Say that gradients were added up in a narrow dtype.

    What ranks have added up exactly is in general no number of the narrow dtype, whatever they
    added. So where gradients are reduced over ranks, the reduction itself was narrow.
    """
    own = experts_of_ranks(context, item.row.name.rpartition(".")[0])
    is_reduced = any(role_of(axis) in _REDUCING for axis in context.mesh.live)
    if own:  # an expert has the tokens of all ranks of ep; it is reduced if it is held twice
        is_reduced = len(set(own.values())) < len(own)
    component = "reduction" if is_reduced else "backward"
    proof = _proof(dtype, noise, True, component)
    proof.component = component
    proof.key = (*proof.key, "sums")
    where = "their reduction over ranks" if is_reduced else "their accumulation"
    proof.text += (
        f" They are not the reference's gradients rounded, but further off: {where} adds up in "
        f"{dtype}."
    )
    return proof


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(values.to(dtype).to(torch.float64), values)


def _proof(dtype: str, noise: float, rounded: bool, component: str) -> Proof:
    how = (
        f"every element is one that {dtype} can represent"
        if rounded
        else f"the error is within what a run in {dtype} would have"
    )
    # What is left is measured in the budget of the dtype itself: its own rounding is all there is.
    return Proof(
        PRECISION,
        0.0 if rounded else float("nan"),
        key=(PRECISION, dtype, rounded),
        detail={"dtype": dtype, "eps_of_dtype": noise, "representable": rounded},
        text=f"{how[0].upper()}{how[1:]}: look for a cast, autocast or a reduction and "
        f"accumulation in {dtype}.",
        # Noise of the right size is no proof by itself.
        candidates=() if rounded else (f"{component}/{PRECISION}", f"{component}/unknown"),
        separate_by=None
        if rounded
        else f"run again with every dtype set to float64: an error that {dtype} made is gone",
    )
