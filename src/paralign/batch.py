"""A rank's share of a global batch: its rows, its slice of the sequence, labels and positions.

Every rank is handed the same global batch. For ``dp_shard=2, cp=2`` and a batch ``[B, S]``::

                    S: first half     S: second half
    B: first half   dp 0, cp 0        dp 0, cp 1
    B: second half  dp 1, cp 0        dp 1, cp 1

Labels are shifted on the whole sequence, before it is cut, and positions travel with the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paralign.documents import document_starts
from paralign.dropout import token_draws
from paralign.errors import DataError
from paralign.loss import IGNORE_INDEX, count_valid_tokens, shift_labels
from paralign.mesh import Degrees
from paralign.parallel.context import split_sequence_indices

# Fingerprints fit into 16 bits, so that the sum of their squares over a million ranks is exact in
# float64.
_FINGERPRINT_BITS = 16

_KEYS = {"tokens", "labels", "documents", "samples"}


@dataclass(frozen=True, kw_only=True)
class LocalBatch:
    """What one rank holds of a global batch.

    Attributes:
        tensors: ``tokens``, ``labels`` and ``positions``, each ``[B / dp, S / cp]`` int64; with a
            model that has dropout ``draws`` as well, see ``dropout.py``; where attention must stay
            inside of documents, ``documents`` ``[B / dp, S]``, see ``documents.py``.
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
    token_parts: int = 1,
    dropout_seed: int | None = None,
) -> LocalBatch:
    """Cut this rank's share out of a global batch.

    Shapes:
        global_batch: ``tokens`` ``[B, S]`` integers, and optionally ``labels`` ``[B, S]``, already
            shifted: ``labels[:, t]`` is what ``tokens[:, t]`` should predict, -100 where nothing
            is. Without labels they are the next tokens. Optionally ``documents`` ``[B, S]``:
            neighbours with the same number are of one document, and attention stays inside of it.
            Optionally ``samples`` ``[B]``: the number of each row in the order of the run, which
            dropout is drawn by.
        returns: tensors ``[B / dp, S / cp]``; ranks along tp hold the same.

    Args:
        global_batch: What every rank is given.
        degrees: Size of every axis.
        rank: Whose share.
        num_microbatches: Pieces that the rows are cut into.
        load_balance: Two chunks of the sequence each; see :class:`paralign.Context`.
        token_parts: Ranks that share these tokens somewhere: tp with sequence parallel or experts.
        dropout_seed: Seed of what the model drops; None: it drops nothing.

    Comm:
        None. :meth:`Program.step` compares fingerprints.

    Raises:
        DataError: Lists every rule that the batch breaks.
    """
    tokens, labels = _check(global_batch, degrees, num_microbatches, load_balance, token_parts)
    documents = _integers(global_batch, "documents")
    whole_rows = {} if documents is None else {"documents": document_starts(documents)}
    coordinates = degrees.coordinates(rank)
    rows = tokens.shape[0] // degrees.dp
    dp_index = coordinates["dp_replicate"] * degrees.dp_shard + coordinates["dp_shard"]
    row_slice = slice(dp_index * rows, (dp_index + 1) * rows)
    columns = sequence_positions(tokens.shape[1], degrees.cp, load_balance)[coordinates["cp"]]

    local_labels = labels[row_slice, columns]
    positions = columns.expand(rows, -1).contiguous()
    samples = _integers(global_batch, "samples")
    drawn = {}
    if dropout_seed is not None and samples is not None:
        drawn["draws"] = token_draws(dropout_seed, samples[row_slice], positions)
    return LocalBatch(
        tensors={
            "tokens": tokens[row_slice, columns].contiguous(),
            "labels": local_labels.contiguous(),
            "positions": positions,
            **drawn,
            **{name: tensor[row_slice].contiguous() for name, tensor in whole_rows.items()},
        },
        seq_len=tokens.shape[1],
        num_global_tokens=int(count_valid_tokens(labels)),
        num_local_tokens=int(count_valid_tokens(local_labels)),
        fingerprint=_fingerprint(
            tokens, labels, *whole_rows.values(), *([samples] if samples is not None else [])
        ),
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
            "position exactly once. Use a seq_len that divides."
        )
    return slices


def _check(
    global_batch: Mapping[str, Tensor],
    degrees: Degrees,
    num_microbatches: int,
    load_balance: bool,
    token_parts: int,
) -> tuple[Tensor, Tensor]:
    tokens = _integers(global_batch, "tokens")
    if tokens is None or tokens.dim() != 2:
        shape = None if tokens is None else tuple(tokens.shape)
        raise DataError(
            f"tokens has shape {shape}; a global batch needs tokens [rows, sequence]. Pass the "
            "same global batch on every rank: program.shard cuts it."
        )
    labels = _integers(global_batch, "labels")
    documents = _integers(global_batch, "documents")
    if labels is None:
        labels = shift_labels(tokens)
        if documents is not None and documents.shape == tokens.shape:
            labels[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORE_INDEX
    problems = []
    problems += _key_problems(global_batch, tokens)
    problems += _document_problems(tokens, labels, documents)
    if labels.shape != tokens.shape:
        problems.append(
            f"labels {tuple(labels.shape)} and tokens {tuple(tokens.shape)} must have one shape"
        )
    elif not bool((labels != IGNORE_INDEX).any()):
        problems.append(f"every label is {IGNORE_INDEX}: there is no token to learn from")
    elif _is_unshifted(tokens, labels):
        problems.append(
            "labels equal the tokens at the same positions: they are not shifted. Leave labels "
            "out, or shift them before the batch is cut"
        )
    problems += _share_problems(tokens, degrees, num_microbatches, load_balance)
    if not problems and tokens.shape[1] // degrees.cp % token_parts:
        share = math.lcm(degrees.cp * token_parts, degrees.cp * (2 if load_balance else 1))
        problems.append(
            f"seq_len={tokens.shape[1]} over axis 'cp' ({degrees.cp} ranks) does not divide over "
            f"axis 'tp' ({token_parts} ranks), as sequence parallel and experts need. Pad the "
            f"sequence to a multiple of {share}"
        )
    if problems:
        raise DataError.from_problems("the global batch cannot be cut", problems)
    return tokens, labels


def _key_problems(global_batch: Mapping[str, Tensor], tokens: Tensor) -> list[str]:
    problems = []
    if extra := sorted(set(global_batch) - _KEYS):
        problems.append(
            f"keys {extra} are not used: pass tokens, labels, documents and samples only"
        )
    samples = _integers(global_batch, "samples")
    if samples is not None and samples.shape != tokens.shape[:1]:
        problems.append(
            f"samples {tuple(samples.shape)} must be one number for each of {tokens.shape[0]} rows"
        )
    return problems


def _document_problems(tokens: Tensor, labels: Tensor, documents: Tensor | None) -> list[str]:
    if documents is None:
        return []
    if documents.shape != tokens.shape:
        return [
            f"documents {tuple(documents.shape)} and tokens {tuple(tokens.shape)} must have one "
            "shape"
        ]
    if labels.shape != tokens.shape:
        return []  # said elsewhere
    ends = documents[:, 1:] != documents[:, :-1]
    crossing = (labels[:, :-1] != IGNORE_INDEX) & ends
    if not bool(crossing.any()):
        return []
    row, at = crossing.nonzero()[0].tolist()
    return [
        f"{int(crossing.sum())} labels cross the end of a document, the first in row {row} at "
        f"position {at}: its last token predicts nothing. Give it the label {IGNORE_INDEX}, or "
        "leave labels out"
    ]


def _integers(global_batch: Mapping[str, Tensor], name: str) -> Tensor | None:
    value = global_batch.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise DataError(f"{name} is a {type(value).__name__}. Pass a tensor of whole numbers.")
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise DataError(f"{name} has dtype {value.dtype}. Pass whole numbers, such as torch.int64.")
    return value.long()


def _is_unshifted(tokens: Tensor, labels: Tensor) -> bool:
    """Whether each label is its own token; where a token is repeated, that may be right."""
    is_valid = labels != IGNORE_INDEX
    is_own = bool((labels == tokens)[is_valid].all())
    is_next = bool((labels[:, :-1] == tokens[:, 1:])[is_valid[:, :-1]].all())
    return is_own and not is_next


def _share_problems(
    tokens: Tensor, degrees: Degrees, num_microbatches: int, load_balance: bool
) -> list[str]:
    rows, seq_len = tokens.shape
    problems = []
    share = degrees.dp * num_microbatches
    if rows % share or not rows:
        problems.append(
            f"{rows} rows do not divide over axis 'dp' ({degrees.dp} ranks) times "
            f"num_microbatches={num_microbatches}. Use a multiple of {share}"
        )
    chunks = degrees.cp * (2 if load_balance else 1)
    if seq_len % chunks or not seq_len:
        balanced = ", two chunks each for load_balance" if load_balance else ""
        problems.append(
            f"seq_len={seq_len} does not divide over axis 'cp' ({degrees.cp} ranks{balanced}). "
            f"Pad the sequence to a multiple of {chunks}, with labels {IGNORE_INDEX}"
        )
    return problems


def _fingerprint(*tensors: Tensor) -> int:
    """Hash whole numbers with their positions, in wrapping 64-bit arithmetic."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    keys = (
        torch.arange(1, flat.numel() + 1) * -7046029254386353131
    )  # an odd constant near 2**64 / phi
    mixed = (flat + keys) * 6364136223846793005
    mixed = mixed ^ (mixed >> 29)
    return int(mixed.sum()) % (1 << _FINGERPRINT_BITS)
