"""Parameters that hold several: queries, keys and values in one, or gate and up projection.

Rows of the fused tensor follow each other in blocks, one block per part, and the sequence of blocks
may repeat. Two tp ranks with three kv heads each, one repetition per kv head::

    rank 0:  q0 k0 v0  q1 k1 v1  q2 k2 v2      part k of rank 0: rows of k0 k1 k2
    rank 1:  q3 k3 v3  q4 k4 v4  q5 k5 v5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paralign.errors import ConfigError
from paralign.layout import Interval, Span


@dataclass(frozen=True)
class Fused:
    """Say that one parameter holds several, so that each is recorded under its own name.

    Args:
        parts: Name of each part -> its share of the rows, in the order in which they are held:
            ``{"*.wq.weight": 4, "*.wk.weight": 1, "*.wv.weight": 1}`` for 4 query heads per kv
            head.
        dim: The tensor dim along which they are joined.
        groups: How often the sequence of parts repeats along ``dim`` of the whole tensor: the
            number of kv heads where every head's q, k, v are together; 1 for all of q, then all of
            k, cut into shards without regard to the parts. Default: every rank's shard is one
            repetition, ``[q; k; v]`` of its own heads.

    Raises:
        ConfigError: There are fewer than two parts, or a share or ``groups`` is not positive.
    """

    parts: Mapping[str, int]
    dim: int = 0
    groups: int | None = None

    def __post_init__(self) -> None:
        problems = []
        if len(self.parts) < 2:
            problems.append(f"parts={dict(self.parts)!r} must name at least two parts")
        problems += [
            f"parts[{name!r}]={share!r} must be a positive whole number"
            for name, share in self.parts.items()
            if not isinstance(share, int) or isinstance(share, bool) or share < 1
        ]
        if self.groups is not None and self.groups < 1:
            problems.append(f"groups={self.groups} must be at least 1")
        if problems:
            raise ConfigError.from_problems("Fused cannot be split like this", problems)


@dataclass(frozen=True)
class FusedPart:
    """One part of a fused parameter."""

    rule: Fused
    index: int


@dataclass(frozen=True)
class Rows:
    """What a piece of a fused tensor holds of one part."""

    size: int
    """Global size of the part along the dim."""
    take: tuple[Interval, ...]
    """Rows of the local fused tensor that belong to the part."""
    spans: tuple[Span, ...]
    """Where they belong: one span per interval of ``take``."""


def rows_of_part(
    spans: Sequence[Span],
    size: int,
    part: FusedPart,
    name: str,
    *,
    shard: Sequence[Span] | None = None,
) -> Rows:
    """Return which rows of a local fused tensor belong to ``part``, and where.

    Args:
        spans: What the rank holds of the fused tensor along the fused dim.
        size: Global size of that dim.
        part: The part.
        name: Of the fused parameter, for messages.
        shard: What the tp shard is of it, where FSDP has cut that once more.

    Raises:
        ConfigError: The rows cannot be divided into the parts.
    """
    shares = list(part.rule.parts.values())
    groups = part.rule.groups
    if groups is None:
        # One contiguous shard per rank is one repetition. Without shards, or with rows that are
        # put back into the order of the whole tensor (strided shards), there is one in all.
        shard = spans if shard is None else shard
        held = shard[0].local[1] - shard[0].local[0] if len(shard) == 1 else size
        if size % held:
            raise ConfigError(
                f"names[{name!r}]: this rank holds {held} of {size} rows, which is no even share, "
                "so the parts of its block are not known. Give groups=."
            )
        groups = size // held
    if size % (groups * sum(shares)):
        raise ConfigError(
            f"names[{name!r}]: {size} rows cannot be divided into {groups} groups of parts with "
            f"the shares {shares}. Give groups= and shares that divide them."
        )
    unit = size // (groups * sum(shares))
    block = sum(shares) * unit
    before, length = sum(shares[: part.index]) * unit, shares[part.index] * unit
    take: list[Interval] = []
    found: list[Span] = []
    at = 0
    for (local, _), (first, last) in spans:
        for group in range(first // block, -(-last // block)):
            start = max(first, group * block + before)
            stop = min(last, group * block + before + length)
            if start >= stop:
                continue
            inside = group * length + start - (group * block + before)
            take.append((local + start - first, local + stop - first))
            found.append(Span((at, at + stop - start), (inside, inside + stop - start)))
            at += stop - start
    return Rows(groups * length, tuple(take), tuple(found))
