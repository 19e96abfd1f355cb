"""Look up all micro-batches of a run; where rows read alike, ranks that share them tell each other.

Slices of padding are the same in many rows, so a rank along cp may not know which rows it holds.
But its peers hold other slices of the same rows, and all slices together tell::

    table row 3     a b c d . . . .      cp rank 0: a b c d, which is row 3 alone
    table row 5     e f g h . . . .      cp rank 1: . . . ., rows 3 or 5: its peer's, so row 3
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paralign.align.token_map import (
    PADDING,
    Held,
    Inputs,
    Key,
    Samples,
    TokenTable,
    find_tokens,
)
from paralign.align.trace import RankIndex
from paralign.align.trace_reader import TraceReader

# Along these axes ranks work on the same rows.
_SAME_ROWS = ("cp", "sp", "tp", "pp")

# Few rows begin alike; the whole slice is compared only with these.
_FIRST_TOKENS = 8


def find_all_tokens(
    trace: TraceReader,
    fed: Mapping[Key, Inputs],
    table: TokenTable,
    samples: Mapping[Key, Samples],
) -> dict[Key, Held]:
    """Look up the rows of all micro-batches in the table.

    Args:
        trace: The run.
        fed: What its micro-batches were fed.
        table: The rows of the global batch.
        samples: Sample numbers of their rows, where they were told; they decide before peers do.
    """
    given = {key: inputs for key, inputs in fed.items() if "tokens" in inputs}
    held = {
        key: find_tokens(inputs, table, trace.ranks[key[0]], samples.get(key))
        for key, inputs in given.items()
    }
    alike = {
        key: _alike(inputs["tokens"], held[key], table)
        for key, inputs in given.items()
        if key not in samples and _peers(trace.ranks[key[0]])
    }
    for key, own in alike.items():
        if all(len(rows) < 2 for rows in own):
            continue
        peers = [alike.get((rank, key[1]), []) for rank in _peers(trace.ranks[key[0]])]
        told = [rows for rows in peers if len(rows) == len(own)]
        shared = [set.intersection(*rows) for rows in zip(own, *told, strict=True)]
        expected = [rows.pop() if len(rows) == 1 else PADDING for rows in shared]
        held[key] = find_tokens(given[key], table, trace.ranks[key[0]], rows=expected)
    return held


def _peers(index: RankIndex) -> list[int]:
    """Return the other ranks that work on the same rows, along one axis."""
    return [
        rank
        for axis, ranks in index.axes.items()
        if axis.startswith(_SAME_ROWS)
        for rank in ranks
        if rank != index.rank
    ]


def _alike(tokens: Tensor, held: Held, table: TokenTable) -> list[set[int]]:
    """Return per row of a micro-batch the rows of the table that read alike where it was found."""
    found: list[set[int]] = [set() for _ in range(len(tokens))]
    for block in held.blocks:
        inside = [at for span in block.positions for at in range(*span.local)]
        places = torch.tensor([at for span in block.positions for at in range(*span.global_)])
        for row in (row for span in block.rows for row in range(*span.local)):
            content = tokens[row, inside]
            rows = torch.arange(len(table.tokens))
            for part in (slice(0, _FIRST_TOKENS), slice(_FIRST_TOKENS, None)):
                same = table.tokens[rows[:, None], places[part]] == content[part]
                rows = rows[same.all(1)]
            found[row] = set(rows.tolist())
    return found
