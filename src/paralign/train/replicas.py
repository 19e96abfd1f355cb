"""Do copies of a tensor on several ranks hold the same bits? They must, or the run is not one.

What has copies:

==================  ====================================================================
over                copies of
==================  ====================================================================
``dp_replicate``    every shard of a parameter and of its gradient
``tp``              those that tensor parallelism does not cut
``routed``          router biases: all ranks of a pipeline stage have them whole
``pp``              tied parameters that two stages hold, and their gradients
==================  ====================================================================

Over ``dp_shard`` and ``cp`` parameters are cut, so that nothing else is there twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.checksum import BITS, checksum
from paralign.errors import TrainingError
from paralign.local_weights import local_of
from paralign.mesh import FOLDS, Axis, Degrees, degrees_of, fold
from paralign.models.router import named_biases
from paralign.parallel.tensor_weights import is_replicated
from paralign.program import Program

PARAMETER, BIAS, GRADIENT = "parameter", "router bias", "gradient"  # the cause before what follows
_MOST_LINES = 10

What = tuple[str, str]  # which kind of tensor, and its global name
_Found = tuple[str, str, str, int]  # the same, the axis of the copies, and this rank's checksum


class ReplicaCheck:
    """Looks at copies every so many steps.

    Args:
        program: What trains.
        every: Steps between two looks; 0: none.
        alike_at: A step after which copies were alike: of the checkpoint that was loaded, or 0.
    """

    def __init__(self, program: Program, *, every: int, alike_at: int) -> None:
        self._program, self._every, self._alike_at = program, every, alike_at

    def look(self, step: int) -> None:
        """Compare copies if it is time to, before ``step`` moves parameters.

        Comm:
            See :func:`find_differences`.

        Raises:
            TrainingError: Copies differ; on every rank.
        """
        if not self._every or step % self._every:
            return
        if lines := find_differences(self._program):
            raise TrainingError(_message(lines, step, self._alike_at))
        self._alike_at = step - 1


def find_differences(program: Program) -> list[str]:
    """Return a line for every tensor whose copies differ, the same ones on every rank.

    A rank that sees a difference tells all others, so that they can raise together.

    Comm:
        Per tensor with copies, two numbers (a checksum, and its negative) in one all-reduce over
        each axis of the table above; then one all-reduce of one number over the world. If copies
        differ, one all-gather of names.
    """
    held = _checksums(program)
    found = [
        *_differing(program, Axis.DP_REPLICATE, {w: s for w, s in held.items() if w[0] != BIAS}),
        *_differing(program, Axis.TP, _whole_over_tp(program, held)),
        *_differing(program, Axis.ROUTED, {w: s for w, s in held.items() if w[0] == BIAS}),
        *_differing_tied(program, held),
    ]
    count = torch.tensor([len(found)], device=program.device)
    dist.all_reduce(count)
    if not int(count):
        return []
    everyone: list[list[_Found]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return _lines(everyone, degrees_of(program.mesh))


def _checksums(program: Program) -> dict[What, Tensor]:
    none = torch.zeros((), dtype=torch.int64, device=program.device)
    held: dict[What, Tensor] = {}
    for name, parameter in program.named_parameters():
        grad = parameter.grad
        held[PARAMETER, name] = checksum(local_of(parameter.detach()))
        held[GRADIENT, name] = none if grad is None else checksum(local_of(grad))
    for name, bias in named_biases(program.modules).items():
        held[BIAS, name] = checksum(bias)
    return held


def _whole_over_tp(program: Program, held: Mapping[What, Tensor]) -> dict[What, Tensor]:
    whole = {name for name, p in program.named_parameters() if is_replicated(p, Axis.TP)}
    return {what: one for what, one in held.items() if what[0] != BIAS and what[1] in whole}


def _differing(program: Program, axis: Axis, copies: Mapping[What, Tensor]) -> list[_Found]:
    """Return the copies of this rank that other ranks along ``axis`` hold differently."""
    group = _group(program, axis)
    if not copies or dist.get_world_size(group) == 1:
        return []
    mine = torch.stack(list(copies.values()))
    is_alike = _alike(mine, -mine, group)
    return [
        (*what, str(axis), int(one))
        for (what, one), alike in zip(copies.items(), is_alike, strict=True)
        if not alike
    ]


def _differing_tied(program: Program, held: Mapping[What, Tensor]) -> list[_Found]:
    """Return the copies of tied parameters of this rank that another stage holds differently."""
    pairs = program.tied_aliases  # of all stages, on every rank
    if not pairs:
        return []
    whats = [(kind, alias) for alias in pairs for kind in (PARAMETER, GRADIENT)]
    mine = {
        (kind, alias): [held[kind, n] for n in (alias, pairs[alias]) if (kind, n) in held]
        for kind, alias in whats
    }
    # A rank without a copy has nothing to say; one with both says the larger and the smaller.
    nothing = torch.full((), -(1 << BITS), device=program.device)
    high = torch.stack([torch.stack([nothing, *mine[what]]).max() for what in whats])
    low = torch.stack([torch.stack([nothing, *(-s for s in mine[what])]).max() for what in whats])
    is_alike = _alike(high, low, _group(program, Axis.PP))
    return [
        (kind, f"{alias} (tied to {pairs[alias]})", str(Axis.PP), int(one))
        for (kind, alias), alike in zip(whats, is_alike, strict=True)
        for one in mine[kind, alias]
        if not alike
    ]


def _alike(high: Tensor, low: Tensor, group: dist.ProcessGroup) -> list[bool]:
    """Whether the largest checksum of a group is its smallest."""
    both = torch.cat([high, low])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = both.chunk(2)
    result: list[bool] = (largest == -smallest).tolist()
    return result


def _group(program: Program, axis: Axis) -> dist.ProcessGroup:
    mesh = program.mesh
    return (fold(mesh, axis) if axis in FOLDS else mesh[str(axis)]).get_group()


@dataclass(frozen=True)
class _Place:
    """Ranks that hold copies of one piece of a tensor."""

    kind: str
    name: str
    axis: str
    rest: tuple[Any, ...]  # their coordinates on other axes


def _lines(everyone: Sequence[Sequence[_Found]], degrees: Degrees) -> list[str]:
    places: dict[_Place, dict[int, int]] = {}
    for rank, found in enumerate(everyone):
        for kind, name, axis, number in found:
            over = {str(one) for one in FOLDS.get(Axis(axis), (axis,))}
            at = degrees.coordinates(rank)
            rest = tuple(index for one, index in at.items() if one not in over)
            # Both copies of a tied pair may be on one rank; then they differ there already.
            places.setdefault(_Place(kind, name, axis, rest), {}).setdefault(rank, number)
    order = {kind: number for number, kind in enumerate((PARAMETER, BIAS, GRADIENT))}
    return [
        f"{place.kind} {place.name} over axis {place.axis!r}: {_odd(numbers, degrees)}"
        for place, numbers in sorted(places.items(), key=lambda item: order[item[0].kind])
    ]


def _odd(numbers: Mapping[int, int], degrees: Degrees) -> str:
    """Name the ranks that differ from most others; of two, which is right is not known."""
    values = list(numbers.values())
    common = max(dict.fromkeys(values), key=values.count)
    first = next(rank for rank, number in numbers.items() if number == common)
    if len(numbers) == 1:
        return f"[{degrees.describe_rank(first)}] holds two that differ"
    odd = [rank for rank, number in numbers.items() if number != common]
    shown = ", ".join(f"[{degrees.describe_rank(rank)}]" for rank in odd)
    verb = "differs" if len(odd) == 1 else "differ"
    others = f"the other {values.count(common)}, such as " if values.count(common) > 1 else ""
    return f"{shown} {verb} from {others}[{degrees.describe_rank(first)}]"


def _message(lines: Sequence[str], step: int, alike_at: int) -> str:
    shown = [f"  - {line}" for line in lines[:_MOST_LINES]]
    if len(lines) > _MOST_LINES:
        shown.append(f"  - and {len(lines) - _MOST_LINES} more")
    text = "\n".join([f"step {step}: copies of a tensor differ between ranks:", *shown])
    return (
        f"{text}\nThey were alike after step {alike_at}, so a checkpoint of a later step may hold "
        "a wrong copy. Remove checkpoints after it and run the same command: all copies are then "
        "loaded alike. If the same rank differs again, its device computes wrongly: leave it out. "
        "If others do, look for what changes a tensor on one rank alone: a hook, a random number, "
        "a write to .data."
    )
