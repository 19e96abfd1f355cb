"""Several documents in one row: where each begins, its own positions, and who attends to whom.

::

    row         a0 a1 a2 | b0 b1 | c0 c1 c2
    documents    0  0  0    3  3    5  5  5     where the document of each token begins
    positions    0  1  2    3  4    5  6  7     in the row, which say where a token lies
    inside       0  1  2    0  1    0  1  2     in its document, which say what rotary tables turn

The row is cut over cp like any other. Each rank keeps ``documents`` of whole rows, since a mask is
global.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_starts(documents: Tensor) -> Tensor:
    """Number documents by where they begin, whatever they are numbered by.

    Shapes:
        documents: ``[B, S]`` whole numbers, whole rows; neighbours with the same number are of one
            document.
        returns: ``[B, S]`` int64; given itself, it stays as it is.
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(is_start, places, 0).cummax(dim=1).values


def positions_inside(positions: Tensor, documents: Tensor | None) -> Tensor:
    """Return the position of each token in its document; None: a row is one document.

    Shapes:
        positions: ``[B, S_local]``, in the row.
        documents: ``[B, S]``, whole rows, from :func:`document_starts`.
        returns: ``[B, S_local]``.
    """
    return positions if documents is None else positions - documents.gather(1, positions)


def document_mask(documents: Tensor | None) -> Tensor | None:
    """Let a token attend to itself and to those before it in its document; None: nothing to mask.

    Shapes:
        documents: ``[B, S]``, whole rows, from :func:`document_starts`.
        returns: boolean ``[B, 1, S, S]``, True: the query (third dim) attends to the key (fourth).
    """
    if documents is None:
        return None
    places = torch.arange(documents.shape[1], device=documents.device)
    is_before = places <= places.unsqueeze(1)
    return (is_before & (places >= documents.unsqueeze(-1))).unsqueeze(1)
