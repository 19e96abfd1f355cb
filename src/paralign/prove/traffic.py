"""What one collective of a plan moves in a step, for the table that ``paralign check`` prints."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Calls of one collective that a rank makes in one step.

    Attributes:
        what: What it moves.
        collective: Its name.
        axis: The axes it runs over.
        calls: Number of calls, or the largest number where the schedule decides.
        num_bytes: Bytes that this rank sends to others in all calls together. An all-reduce counts
            as the reduce-scatter and the all-gather that it is made of.
        at_most: Whether the schedule may need fewer.
    """

    what: str
    collective: str
    axis: str
    calls: int
    num_bytes: int
    at_most: bool = False


def sent(num_bytes: int, num_ranks: int) -> int:
    """Return what a rank sends of a tensor of which it keeps one n-th."""
    return num_bytes * (num_ranks - 1) // num_ranks


def all_reduced(num_bytes: int, num_ranks: int) -> int:
    """Return what a rank sends of a tensor that is summed, scattered and gathered."""
    return 2 * num_bytes * (num_ranks - 1) // num_ranks
