"""The tensors of a report as compact JSON values, for the script of the page.

Names, kinds and states are written once and referred to by number: 2,000 tensors must stay small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paralign.align.report.place import dim_name, places
from paralign.align.verdict import TensorRow

FIELDS = (
    "kind", "name", "step", "state", "ok", "eps", "budget", "rel", "cosine", "scale", "category",
    "pairedBy", "share", "index", "values", "ranks", "profile",
)  # fmt: skip


def tensor_data(rows: Sequence[TensorRow]) -> dict[str, Any]:
    """Return ``words``, ``fields``, and ``rows`` as lists in the order of the fields."""
    words: dict[str, int] = {}

    def word(text: str | None) -> int | None:
        return None if text is None else words.setdefault(text, len(words))

    return {
        "fields": list(FIELDS),
        "rows": [
            [
                word(row.kind),
                word(row.name),
                row.step,
                word(row.state),
                int(row.ok),
                _digits(row.eps, 4),
                _digits(row.budget_eps, 4),
                _digits(row.rel_l2, 4),
                _digits(row.cosine, 8),
                _digits(row.scale, 8),
                word(row.category),
                word(row.paired_by),
                _digits(row.share_beyond, 3),
                None if row.worst_index is None else list(row.worst_index),
                None if row.worst_values is None else [_digits(v, 12) for v in row.worst_values],
                row.ranks_off,
                None if row.profile is None else _profile(row.profile),
            ]
            for row in rows
        ],
        "words": list(words),
    }


def _profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    dims = profile["dims"]
    return {
        "places": places(profile),
        "dims": [
            [
                dim_name(number, len(dims)),
                dim["size"],
                dim["starts"] if len(dim["starts"]) < dim["size"] else 0,  # 0: one by one
                [
                    _digits(_relative(error, base), 3)
                    for error, base in zip(dim["error"], dim["base"], strict=True)
                ],
                _shares(dim["error"]),
            ]
            for number, dim in enumerate(dims)
        ],
        "ranks": [
            [item["rank"], _digits(_relative(item["error"], item["base"]), 3), share, item["part"]]
            for item, share in zip(
                profile["ranks"], _shares([item["error"] for item in profile["ranks"]]), strict=True
            )
        ],
    }


def _shares(errors: Sequence[float]) -> list[int]:
    """Return how many percent of the squared error each holds; of NaN, all."""
    if any(not math.isfinite(error) for error in errors):
        return [0 if math.isfinite(error) else 100 for error in errors]
    total = math.hypot(*errors)
    return [round(100 * (error / total) ** 2) if total else 0 for error in errors]


def _relative(error: float, base: float) -> float:
    if error == 0.0:
        return 0.0
    return error / base if base else (math.nan if math.isnan(error) else math.inf)


def _digits(value: float | None, digits: int) -> float | int | str | None:
    """Round; whole numbers and numbers that JSON lacks become shorter or a text."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e9 else rounded
