"""FSDP1: one flat tensor holds a whole unit, and a rank holds a range of its elements.

With ``use_orig_params=False`` the unit's only parameter is the flat one; with ``True`` the original
parameters are there, each a one-dimensional tensor of the elements this rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class FlatPart:
    """The elements of one parameter in this rank's flat tensor."""

    fqn: str
    """Name within the FSDP unit."""
    shape: tuple[int, ...]
    offset: int
    """Where they begin in the local tensor."""
    start: int
    """Which element of the parameter is the first one."""
    numel: int
    """How many there are; 0 where other ranks hold them all."""
    ranks: tuple[int, ...]
    """The ranks the unit is split over."""
    index: int
    """Number of the parameter in the unit."""
    owner: nn.Module | None
    aliases: tuple[str, ...] = ()
    """Other names within the unit."""


def flat_parts(parameter: Any, ranks: tuple[int, ...] = ()) -> list[FlatPart]:
    """Return the parameters that ``parameter`` holds; none if it is not FSDP1's flat parameter."""
    if not all(hasattr(parameter, name) for name in ("_fqns", "_shapes", "_shard_param_infos")):
        return []
    return [_part(parameter, index, ranks) for index in range(len(parameter._fqns))]


@dataclass(frozen=True)
class FlatUnits:
    """The FSDP1 units around a module."""

    originals: Mapping[int, FlatPart] = field(default_factory=dict)
    """By the id of an original parameter what it holds (use_orig_params=True)."""
    ranks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By the id of a flat parameter the ranks it is split over."""

    def within(self, module: Any) -> FlatUnits:
        """Return the units around what is inside ``module``, which may be one itself."""
        handle: Any = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            return self
        split = bool(getattr(handle, "uses_sharded_strategy", False))
        ranks = _group_ranks(handle.process_group) if split else ()
        originals = {
            id(original): _part(flat, index, ranks, alone=True)
            for index, original in enumerate(getattr(flat, "_params", None) or ())
            if split
        }
        return FlatUnits({**self.originals, **originals}, {**self.ranks, id(flat): ranks})


def _part(flat: Any, index: int, ranks: tuple[int, ...], *, alone: bool = False) -> FlatPart:
    info = flat._shard_param_infos[index]
    owner = flat._param_infos[index]
    aliases = tuple(
        f"{shared.module_name}.{shared.param_name}".lstrip(".")
        for shared in getattr(flat, "_shared_param_infos", ())
        if shared.prim_module is owner.module and shared.prim_param_name == owner.param_name
    )
    return FlatPart(
        fqn=flat._fqns[index],
        shape=tuple(flat._shapes[index]),
        offset=0 if alone or not info.in_shard else info.offset_in_shard,
        start=info.intra_param_start_idx if info.in_shard else 0,
        numel=info.numel_in_shard if info.in_shard else 0,
        ranks=ranks,
        index=index,
        owner=owner.module,
        aliases=aliases,
    )


def _group_ranks(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))
