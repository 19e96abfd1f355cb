"""Times of several sides that were measured in turn, in one run, and what they say."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

Times = dict[str, float]  # side -> seconds, of one round


def turns(sides: Sequence[str], number: int) -> list[str]:
    """Return the sides in the order of round ``number``.

    Each comes first equally often, and follows others after every ``len(sides)`` rounds: what a
    side leaves in memory and caches serves or hurts the next.
    """
    cycle, first = divmod(number, len(sides))
    order = random.Random(cycle).sample(sides, len(sides))
    return [*order[first:], *order[:first]]


def median_ratio(rounds: Sequence[Times], side: str, base: str) -> float:
    """Return the median over rounds of ``side`` by ``base``, both of the same round.

    Neighbours in time meet the same load of the machine, so their ratio moves less than they do.
    """
    return statistics.median(times[side] / times[base] for times in rounds)


def median_seconds(rounds: Sequence[Times], side: str) -> float:
    """Return the median time of one side."""
    return statistics.median(times[side] for times in rounds)
