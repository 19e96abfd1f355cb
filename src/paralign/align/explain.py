"""Name the cause of a failure where the numbers prove one.

A hypothesis is reported only if the tensor, corrected for it, falls back into its budget. What
fails first in causal order is explained; what follows from it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import combinations

from paralign.align.judge import Compared
from paralign.align.pair import UPDATE
from paralign.align.trace import Kind
from paralign.align.verdict import Finding

_COMPONENTS = {
    Kind.PARAM: "weights",
    "tokens": "data",
    "loss": "loss",
    Kind.GRAD: "backward",
    "norm": "clipping",
    Kind.MOMENT: "optimizer",
    UPDATE: "optimizer",
    Kind.PARAM_AFTER: "optimizer",
}
_LARGEST_FACTOR = 64


def explain_tensors(
    failing: Sequence[Compared],
    sizes: Mapping[str, int],
    owners: Mapping[str, Mapping[str, object]],
) -> list[Finding]:
    """Explain the tensors that fail at the first failing moment.

    Args:
        failing: They; not empty, all of one moment.
        sizes: What a factor could come from: mesh axes and ``num_microbatches``, with their sizes.
        owners: Per parameter the module that owns it.
    """
    findings: list[Finding] = []
    by_factor: dict[Fraction, list[tuple[Compared, float]]] = {}
    missing: list[Compared] = []
    unknown: list[Compared] = []
    for item in failing:
        proof = None if item.moment.kind == Kind.PARAM else constant_factor(item)
        if proof is not None:
            by_factor.setdefault(proof[0], []).append((item, proof[1]))
        elif item.measured.total.size == 0.0 and item.measured.total.base > 0.0:
            missing.append(item)
        else:
            unknown.append(item)
    for factor, proven in sorted(by_factor.items()):
        findings.append(_factor_finding(factor, proven, sizes))
    if missing:
        findings.append(_missing_finding(missing))
    if unknown:
        findings.append(_unknown_finding(unknown))
    for finding in findings:
        owner = owners.get(finding.tensor or "")
        finding.where = None if owner is None else dict(owner)
    return findings


def constant_factor(item: Compared) -> tuple[Fraction, float] | None:
    """Return ``(factor, eps left)`` if the tensor is in budget once the factor is taken out."""
    scale = item.measured.total.scale
    if scale is None or item.tolerance is None or scale == 0.0:
        return None
    factor = simple_factor(scale)
    if factor is None or factor == 1:
        return None
    left = item.relative_if(float(factor))
    if not left <= item.tolerance:
        return None
    per_eps = item.row.eps / item.row.rel_l2 if item.row.rel_l2 else 0.0
    return factor, left * per_eps


def simple_factor(scale: float) -> Fraction | None:
    """Return the whole number, or one over it, that ``scale`` is; None if it is neither."""
    if not math.isfinite(scale) or scale == 0.0:
        return None
    size = abs(scale)
    number = round(size) if size >= 1 else round(1 / size)
    if not 1 <= number <= _LARGEST_FACTOR:
        return None
    factor = Fraction(number) if size >= 1 else Fraction(1, number)
    # Only which number is meant is decided here; whether it is exact, the corrected tensor shows.
    if abs(size / float(factor) - 1) > 1e-2:
        return None
    return factor if scale > 0 else -factor


def factor_candidates(factor: Fraction, sizes: Mapping[str, int]) -> list[str]:
    """Return every axis, or pair of axes, whose size is the factor or one over it."""
    number = abs(factor.numerator * factor.denominator)
    known = {name: size for name, size in sizes.items() if size > 1}
    single = [f"{name}={size}" for name, size in known.items() if size == number]
    double = [
        f"{a}={known[a]} x {b}={known[b]}"
        for a, b in combinations(known, 2)
        if known[a] * known[b] == number
    ]
    return single + double


def _factor_finding(
    factor: Fraction, proven: Sequence[tuple[Compared, float]], sizes: Mapping[str, int]
) -> Finding:
    worst, left = max(proven, key=lambda pair: pair[0].row.strain)
    component = _COMPONENTS[worst.moment.kind]
    candidates = factor_candidates(factor, sizes)
    axes: list[str] = []
    if len(candidates) == 1:
        axes = [part.split("=")[0] for part in candidates[0].split(" x ")]
        axes = [axis for axis in axes if axis != "num_microbatches"]
    if (
        component == "backward"
        and candidates
        and candidates != [f"num_microbatches={sizes.get('num_microbatches')}"]
    ):
        component = "reduction"
    kind = worst.moment.kind
    what = f"{len(proven)} {kind} tensors are" if len(proven) > 1 else f"This {kind} is"
    source = (
        f" The factor is the size of {' or of '.join(candidates)}."
        if candidates
        else " No axis of the mesh has this size."
    )
    return Finding(
        component=component,
        cause="constant_factor",
        tensor=worst.row.label,
        axes=axes,
        evidence={
            **_evidence(worst, left),
            "factor": str(factor),
            "tensors": len(proven),
        },
        fix=f"{what} {factor} times the reference's, to the last digits.{source} Look for a mean "
        "where a sum belongs, a sum where a mean belongs, or a reduction done twice.",
        candidates=candidates if len(candidates) > 1 else [],
        separate_by=_separate(candidates),
    )


def _separate(candidates: Sequence[str]) -> str | None:
    if len(candidates) < 2:
        return None
    names = sorted({part.split("=")[0] for text in candidates for part in text.split(" x ")})
    return (
        f"run again with only one of {', '.join(names)} changed to a size that no other has: the "
        "factor follows the guilty one"
    )


def _missing_finding(missing: Sequence[Compared]) -> Finding:
    worst = max(missing, key=lambda item: item.measured.total.base)
    return Finding(
        component=_COMPONENTS[worst.moment.kind],
        cause="missing_contribution",
        tensor=worst.row.label,
        evidence={**_evidence(worst, None), "tensors": len(missing)},
        fix=f"{worst.moment.kind} is None or zero everywhere in the parallel run, but not in the "
        f"reference ({len(missing)} tensors). Look for a detached output, a frozen parameter, or a "
        "stage whose backward did not run.",
    )


def _unknown_finding(unknown: Sequence[Compared]) -> Finding:
    worst = max(unknown, key=lambda item: item.row.strain)
    ranks = sorted({rank for item in unknown for rank in item.row.ranks_off})
    others = any(
        part.elements and rank not in item.row.ranks_off
        for item in unknown
        for rank, part in item.measured.by_rank.items()
    )
    single = len(ranks) == 1 and others
    evidence = {**_evidence(worst, None), "tensors": len(unknown), "ranks": ranks}
    if single:
        fix = f"Only what rank {ranks[0]} holds is off; the other ranks' parts are in budget."
    elif worst.moment.kind == Kind.PARAM:
        fix = "The runs start from different weights. Start both from the same ones."
    else:
        fix = (
            f"No constant factor explains it. Start with {worst.row.label}: it is the worst of "
            f"{len(unknown)} that fail first."
        )
    return Finding(
        component=_COMPONENTS[worst.moment.kind],
        cause="single_rank" if single else "unknown",
        tensor=worst.row.label,
        evidence=evidence,
        fix=fix,
    )


def _evidence(item: Compared, left: float | None) -> dict[str, object]:
    return {
        "eps_before": item.row.eps,
        "eps_after": left,
        "share_beyond_2e-3": item.row.share_beyond,
        "cosine": item.row.cosine,
        "scale": item.row.scale,
    }
