"""Where in a tensor its error sits: along every dim, and per rank.

Made only of tensors that fail, in a second reading of both sides, part by part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paralign.align.measure import PART_ELEMENTS, Measured
from paralign.align.pair import Piece, Quantity
from paralign.layout import Box, boxes

MOST_PROFILES = 256
"""Tensors of a report that have a profile: the first that fail, in causal order."""
MOST_BINS = 32
"""Bins along a dim; a shorter dim has one bin per index."""
MOST_RANKS = 64
"""Ranks listed, the ones furthest off."""


def error_profile(side: Quantity, base: Quantity, measured: Measured) -> dict[str, Any]:
    """Return where ``side`` differs from ``base``, as JSON values.

    Args:
        side: A quantity that holds its tensor completely.
        base: What it was measured against.
        measured: What was measured.

    Returns:
        ``dims``: per dim its ``size``, and per bin the index it ``starts`` at, the norm of the
        ``error`` and of the ``base`` in it. ``ranks``: per rank the same norms, and the ``part`` of
        the tensor that it holds, from its first to its last index along each dim. A bin with a
        value that is not finite has an error of NaN.
    """
    # Squares of scaled values neither overflow nor vanish.
    scale = measured.total.worst
    scale = scale if scale > 0 and math.isfinite(scale) else 1.0
    base_scale = measured.total.base
    base_scale = base_scale if base_scale > 0 and math.isfinite(base_scale) else 1.0
    bins = [_Bins(size) for size in side.shape]
    for pieces in side.replicas.values():
        piece = max(pieces, key=lambda piece: _error_of(measured, piece))
        for part in boxes(piece.map):
            for box in part.split(PART_ELEMENTS):
                r = base.fetch(box)
                error = ((piece.read(box) - r) / scale).square_()
                expected = (r / base_scale).square_()  # not in place: it may be the file itself
                for dim, histogram in enumerate(bins):
                    histogram.add(box, dim, error, expected)
    return {
        "dims": [histogram.to_dict(scale, base_scale) for histogram in bins],
        "ranks": _ranks(side, measured),
    }


class _Bins:
    def __init__(self, size: int) -> None:
        self._size = size
        self._num_bins = min(size, MOST_BINS)
        self._error = torch.zeros(self._num_bins, dtype=torch.float64)
        self._base = torch.zeros(self._num_bins, dtype=torch.float64)

    def add(self, box: Box, dim: int, error: Tensor, base: Tensor) -> None:
        """Add squares of a part to the bins they fall into."""
        indices = torch.arange(box.start[dim], box.start[dim] + box.shape[dim])
        into = indices * self._num_bins // self._size
        others = [other for other in range(error.ndim) if other != dim]
        self._error.index_add_(0, into, error.sum(dim=others) if others else error)
        self._base.index_add_(0, into, base.sum(dim=others) if others else base)

    def to_dict(self, scale: float, base_scale: float) -> dict[str, Any]:
        starts = [-(-number * self._size // self._num_bins) for number in range(self._num_bins)]
        return {
            "size": self._size,
            "starts": starts,
            "error": _rounded(self._error.sqrt() * scale),
            "base": _rounded(self._base.sqrt() * base_scale),
        }


def _ranks(side: Quantity, measured: Measured) -> list[dict[str, Any]]:
    held: dict[int, list[Box]] = {}
    for piece in side.pieces:
        held.setdefault(piece.rank, []).extend(boxes(piece.map))
    found: list[dict[str, Any]] = [
        {
            "rank": rank,
            "error": _round(math.nan if distance.nonfinite else distance.error),
            "base": _round(distance.base),
            "part": _extent(held.get(rank, ())),
        }
        for rank, distance in measured.by_rank.items()
        if distance.elements
    ]
    found.sort(key=lambda item: -(math.inf if math.isnan(item["error"]) else item["error"]))
    return sorted(found[:MOST_RANKS], key=lambda item: item["rank"])


def _extent(parts: Sequence[Box]) -> list[list[int]]:
    if not parts:
        return []
    return [
        [
            min(box.start[dim] for box in parts),
            max(box.start[dim] + box.shape[dim] for box in parts),
        ]
        for dim in range(len(parts[0].shape))
    ]


def _error_of(measured: Measured, piece: Piece) -> float:
    distance = measured.by_rank[piece.rank]
    return math.inf if distance.nonfinite or math.isnan(distance.error) else distance.error


def _rounded(values: Tensor) -> list[float]:
    return [_round(value) for value in values.tolist()]


def _round(value: float) -> float:
    """Six digits say where; more would only make the report longer."""
    return float(f"{value:.6g}") if math.isfinite(value) else math.nan
