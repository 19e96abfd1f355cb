"""Reports made by hand, of any size, for tests of how they are shown."""

from __future__ import annotations

import random
from typing import Any

from paralign.align.verdict import (
    ALIGNED,
    MISALIGNED,
    Coverage,
    Finding,
    Report,
    TensorRow,
)

HOSTILE = (
    '"><img src=x onerror=alert(1)>.weight',
    "</script><script>alert(2)</script>",
    "<!--<script>alert(3)//",
    "{{ 7*7 }}${alert(4)}.weight",
    "line\N{LINE SEPARATOR}break.weight",
)
COLUMNS = (
    "attention_norm.weight",
    "attention.wq.weight",
    "attention.wo.weight",
    "ffn_norm.weight",
    "ffn.up.weight",
    "ffn.down.weight",
)


def names_of(num_layers: int) -> list[str]:
    layers = [f"layers.{layer}.{column}" for layer in range(num_layers) for column in COLUMNS]
    return ["embedding.weight", *layers, "norm.weight", "head.weight"]


def row(
    kind: str,
    name: str,
    step: int = 0,
    *,
    eps: float = 1.5,
    budget: float | None = 100.0,
    **more: Any,
) -> TensorRow:
    """Return a row that is in budget where ``eps`` is."""
    fields: dict[str, Any] = {
        "cosine": 0.999999,
        "scale": 1.0,
        "worst_index": (3, 5),
        "worst_values": (0.123456789, 0.12345679),
        **more,
    }
    return TensorRow(
        kind=kind,
        name=name,
        step=step,
        rel_l2=eps * 2.0**-52,
        eps=eps,
        budget_eps=budget,
        ok=budget is None or eps <= budget,
        **fields,
    )


def profile(guilty: range, bins: int = 32) -> dict[str, Any]:
    """Return the profile of a matrix of ``8 * bins`` rows whose rows in some bins are wrong."""
    error = [1.0 if at in guilty else 1e-15 for at in range(bins)]
    dim = {
        "size": 8 * bins,
        "starts": [8 * at for at in range(bins)],
        "error": error,
        "base": [1.0] * bins,
    }
    even = {**dim, "error": [1.0] * bins}
    ranks = [
        {"rank": rank, "error": float(rank > 1), "base": 1.0, "part": [[64 * rank, 64], [0, 256]]}
        for rank in range(4)
    ]
    return {"dims": [dim, even], "ranks": ranks}


def finding(**more: Any) -> Finding:
    fields: dict[str, Any] = {
        "component": "reduction",
        "cause": "missing_reduction",
        "fix": "Fold cp into the FSDP mesh.",
        "tensor": "norm.weight",
        "axes": ["cp"],
        "evidence": {"eps_before": 4.5e15, "eps_after": 2.0, "share_beyond_2e-3": 0.0},
        "where": {"module": "norm", "class": "RMSNorm", "file": "model.py", "line": 31},
        "candidates": ["cp=2", "dp_shard=2"],
        "separate_by": "run again with cp=4",
        **more,
    }
    return Finding(**fields)


def report(rows: list[TensorRow], **more: Any) -> Report:
    failing = [item for item in rows if not item.ok]
    fields: dict[str, Any] = {
        "verdict": MISALIGNED if failing else ALIGNED,
        "why": f"first out of budget: {failing[0].name}" if failing else "all within budget",
        "dtype": "float64",
        "yardstick": "fp64",
        "mesh": {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 1},
        "coverage": Coverage(
            parameters=len({item.name for item in rows}), compared=3, elements=1234
        ),
        "worst": max(rows, key=lambda item: item.strain, default=None),
        "timings": {"compare_s": 1.2, "parallel_s": 3.4},
        "findings": [finding()] if failing else [],
        **more,
    }
    return Report(tensors=rows, **fields)


def small_report() -> Report:
    """Return two steps of a small model: from the second on, norms are wrong."""
    rows = []
    for step in (0, 1):
        value = 2.5 - 0.25 * step
        rows.append(row("loss", "loss", step, eps=0.5, paired_by=None, worst_values=(value, value)))
        for name in names_of(2):
            wrong = step == 1 and "norm" in name
            more: dict[str, Any] = {"ranks_off": [2, 3], "profile": profile(range(16, 32))}
            rows.append(
                row("grad", name, step, eps=4.5e15 if wrong else 1.5, **(more if wrong else {}))
            )
    return report(rows)


def large_report(num_tensors: int, *, failing: bool = True) -> Report:
    """Return about as many tensors over five steps, half of them wrong, each with a profile."""
    random_ = random.Random(0)
    names = names_of(num_tensors // (5 * len(COLUMNS)))
    rows = []
    for step in range(5):
        for name in names:
            wrong = failing and random_.random() < 0.5
            eps = 10 ** random_.uniform(3, 15.6) if wrong else 10 ** random_.uniform(-0.5, 1.5)
            more: dict[str, Any] = {"ranks_off": [0, 1, 2], "share_beyond": random_.random()}
            if wrong:
                more["profile"] = {
                    "dims": [
                        {
                            "size": 4096,
                            "starts": [128 * at for at in range(32)],
                            "error": [random_.random() for _ in range(32)],
                            "base": [random_.random() for _ in range(32)],
                        }
                    ]
                    * 2,
                    "ranks": [
                        {
                            "rank": rank,
                            "error": random_.random(),
                            "base": 1.0,
                            "part": [[0, 4096]] * 2,
                        }
                        for rank in range(8)
                    ],
                }
            values = (random_.gauss(0, 1), random_.gauss(0, 1))
            rows.append(row("grad", name, step, eps=eps, worst_values=values, **more))
    return report(rows)
