"""Where along the sequence a module's output, or its gradient, is off."""

from __future__ import annotations

import torch

from paralign.align.explain.proof import pieces_once
from paralign.align.judge import Compared
from paralign.layout import boxes


def error_by_position(item: Compared) -> list[float] | None:
    """Return the norm of the error at every position of the sequence, over all rows.

    None where the tensor has no positions: it is not ``[rows, positions, ...]``.
    """
    shape = item.base.shape
    if len(shape) < 2:
        return None
    squares = torch.zeros(shape[1], dtype=torch.float64)
    for piece in pieces_once(item):
        for box in boxes(piece.map):
            error = (piece.read(box) - item.base.fetch(box)).square()
            by_position = error.sum(dim=[dim for dim in range(error.dim()) if dim != 1])
            squares[box.start[1] : box.start[1] + box.shape[1]] += by_position
    return squares.sqrt().tolist()
