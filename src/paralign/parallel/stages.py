"""Which layers make a pipeline stage, and which stages a rank runs. Pure: nothing here needs torch.

Two stages a rank, four ranks; looped schedules go around, V schedules come back::

    rank            0     1     2     3
    looped stages  0,4   1,5   2,6   3,7
    V stages       0,7   1,6   2,5   3,4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from paralign.errors import ScheduleError


class Placement(Enum):
    """How a schedule lays stages over ranks."""

    SINGLE = "one stage a rank"
    LOOP = "looped"
    V = "V-shaped"


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """What is fixed about one of torch's schedules."""

    name: str  # torch's own name, as `torch.distributed.pipelining` spells it after "Schedule"
    placement: Placement
    zero_bubble: bool = False  # splits the backward pass into input and weight parts


SCHEDULES = {
    kind.name.lower(): kind
    for kind in (
        ScheduleKind(name="GPipe", placement=Placement.SINGLE),
        ScheduleKind(name="1F1B", placement=Placement.SINGLE),
        ScheduleKind(name="Interleaved1F1B", placement=Placement.LOOP),
        ScheduleKind(name="LoopedBFS", placement=Placement.LOOP),
        ScheduleKind(name="InterleavedZeroBubble", placement=Placement.LOOP, zero_bubble=True),
        ScheduleKind(name="ZBVZeroBubble", placement=Placement.V, zero_bubble=True),
        ScheduleKind(name="DualPipeV", placement=Placement.V, zero_bubble=True),
    )
}


def find_schedule(name: str) -> ScheduleKind:
    """Return the schedule called ``name``, in any case.

    Raises:
        ScheduleError: There is no such schedule; the nearest name is suggested.
    """
    kind = SCHEDULES.get(name.lower())
    if kind is None:
        near = get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.4)
        hint = f"Did you mean {SCHEDULES[near[0]].name}? " if near else ""
        known = ", ".join(kind.name for kind in SCHEDULES.values())
        raise ScheduleError(f"schedule={name!r} is not a schedule. {hint}Use one of {known}.")
    return kind


def default_stages_per_rank(kind: ScheduleKind) -> int:
    """Return how many stages a rank runs when the config does not say."""
    return 1 if kind.placement is Placement.SINGLE else 2


def split_layers(
    num_layers: int, num_stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """Return the global layer indices of every stage, in model order.

    Without ``layers_per_stage`` the split is as even as it can be; the first stages get one layer
    more where it does not divide.
    """
    if layers_per_stage is None:
        even, extra = divmod(num_layers, num_stages)
        layers_per_stage = [even + (stage < extra) for stage in range(num_stages)]
    starts = [sum(layers_per_stage[:stage]) for stage in range(num_stages)]
    return [range(start, start + n) for start, n in zip(starts, layers_per_stage, strict=True)]


def stages_of_rank(kind: ScheduleKind, pp: int, pp_rank: int, stages_per_rank: int) -> list[int]:
    """Return the stage indices that pipeline rank ``pp_rank`` runs."""
    if kind.placement is Placement.V:
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + turn * pp for turn in range(stages_per_rank)]


def rank_of_stage(kind: ScheduleKind, pp: int, stage: int) -> int:
    """Return the pipeline rank that runs ``stage``."""
    if kind.placement is Placement.V and stage >= pp:
        return 2 * pp - 1 - stage
    return stage % pp
