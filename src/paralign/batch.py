"""A rank's share of a global batch: its rows, its slice of the sequence, labels and positions.

Every rank is handed the same global batch. For ``dp_shard=2, cp=2`` and a batch ``[B, S]``::

                    S: first half     S: second half
    B: first half   dp 0, cp 0        dp 0, cp 1
    B: second half  dp 1, cp 0        dp 1, cp 1

Labels are shifted on the whole sequence, before it is cut, and positions travel with the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.errors import DataError
from paralign.loss import IGNORE_INDEX, count_valid_tokens, shift_labels
from paralign.mesh import Degrees
from paralign.parallel.context import split_sequence_indices

# Fingerprints fit into 20 bits, so that sums of their squares over a million ranks are exact in
# float64.
_FINGERPRINT_BITS = 20


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """What one rank holds of a global batch.

    Attributes:
        tensors: ``tokens``, ``labels`` and ``positions``, each ``[B / dp, S / cp]`` int64.
        seq_len: Global sequence length S.
        num_global_tokens: Valid label tokens of the whole global batch.
        num_local_tokens: Valid label tokens here.
        fingerprint: A small hash of the global batch, equal on ranks that were given the same one.
    """

    tensors: dict[str, Tensor]
    seq_len: int
    num_global_tokens: int
    num_local_tokens: int
    fingerprint: int


def shard_batch(
    global_batch: Mapping[str, Tensor],
    *,
    degrees: Degrees,
    rank: int,
    num_microbatches: int,
    load_balance: bool = False,
) -> LocalBatch:
    """Cut this rank's share out of a global batch.

    Shapes:
        global_batch: ``tokens`` ``[B, S]`` integers, and optionally ``labels`` ``[B, S]``, already
            shifted: ``labels[:, t]`` is what ``tokens[:, t]`` should predict, -100 where nothing
                is. Without
            labels they are the next tokens.
        returns: tensors ``[B / dp, S / cp]``.

    Comm:
        None. :meth:`Program.step` compares fingerprints.

    Raises:
        DataError: Lists every rule that the batch breaks.
    """
    tokens, labels = _check(global_batch, degrees, num_microbatches)
    coordinates = degrees.coordinates(rank)
    rows = tokens.shape[0] // degrees.dp
    dp_index = coordinates["dp_replicate"] * degrees.dp_shard + coordinates["dp_shard"]
    row_slice = slice(dp_index * rows, (dp_index + 1) * rows)
    columns = sequence_positions(tokens.shape[1], degrees.cp, load_balance)[coordinates["cp"]]

    local_labels = labels[row_slice, columns]
    return LocalBatch(
        tensors={
            "tokens": tokens[row_slice, columns].contiguous(),
            "labels": local_labels.contiguous(),
            "positions": columns.expand(rows, -1).contiguous(),
        },
        seq_len=tokens.shape[1],
        num_global_tokens=int(count_valid_tokens(labels)),
        num_local_tokens=int(count_valid_tokens(local_labels)),
        fingerprint=_fingerprint(tokens, labels),
    )


def sequence_positions(seq_len: int, cp: int, load_balance: bool) -> list[Tensor]:
    """Return the global positions of every cp rank, proven disjoint and complete.

    Raises:
        DataError: The slices do not cover the sequence exactly once.
    """
    slices = [split_sequence_indices(seq_len, cp, r, load_balance=load_balance) for r in range(cp)]
    everything = torch.cat(slices).sort().values
    if not torch.equal(everything, torch.arange(seq_len)):
        raise DataError(
            f"the slices of seq_len={seq_len} over axis 'cp' ({cp} ranks) do not cover every "
            "position "
            "exactly once. Use a seq_len that divides."
        )
    return slices


def _check(
    global_batch: Mapping[str, Tensor], degrees: Degrees, num_microbatches: int
) -> tuple[Tensor, Tensor]:
    tokens = global_batch.get("tokens")
    if tokens is None or tokens.dim() != 2:
        shape = None if tokens is None else tuple(tokens.shape)
        raise DataError(
            f"tokens has shape {shape}; a global batch needs tokens [rows, sequence]. Pass the "
            "same "
            "global batch on every rank: program.shard cuts it."
        )
    tokens = tokens.long()
    labels = global_batch.get("labels")
    labels = shift_labels(tokens) if labels is None else labels.long()
    problems = []
    if extra := sorted(set(global_batch) - {"tokens", "labels"}):
        problems.append(f"keys {extra} are not used: pass tokens and labels only")
    if labels.shape != tokens.shape:
        problems.append(
            f"labels {tuple(labels.shape)} and tokens {tuple(tokens.shape)} must have one shape"
        )
    elif (
        bool(((labels == tokens) | (labels == IGNORE_INDEX)).all()) and tokens.unique().numel() > 1
    ):
        problems.append(
            "labels equal the tokens at the same positions: they are not shifted. Leave labels "
            "out, "
            "or shift them before the batch is cut"
        )
    rows, seq_len = tokens.shape
    if rows % (degrees.dp * num_microbatches) or not rows:
        problems.append(
            f"{rows} rows do not divide over axis 'dp' ({degrees.dp} ranks) times "
            f"num_microbatches={num_microbatches}. Use a multiple of "
            f"{degrees.dp * num_microbatches}"
        )
    if seq_len % degrees.cp or not seq_len:
        problems.append(
            f"seq_len={seq_len} does not divide over axis 'cp' ({degrees.cp} ranks). Pad the "
            "sequence "
            f"to a multiple of {degrees.cp}, with labels {IGNORE_INDEX}"
        )
    if not problems and int(count_valid_tokens(labels)) == 0:
        problems.append(f"every label is {IGNORE_INDEX}: there is no token to learn from")
    if problems:
        raise DataError.from_problems("the global batch cannot be cut", problems)
    return tokens, labels


def _fingerprint(tokens: Tensor, labels: Tensor) -> int:
    """Hash tokens and labels with their positions, in wrapping 64-bit arithmetic."""
    flat = torch.cat([tokens.flatten(), labels.flatten()]).cpu()
    keys = (
        torch.arange(1, flat.numel() + 1) * -7046029254386353131
    )  # an odd constant near 2**64 / phi
    mixed = (flat + keys) * 6364136223846793005
    mixed = mixed ^ (mixed >> 29)
    return int(mixed.sum()) % (1 << _FINGERPRINT_BITS)
