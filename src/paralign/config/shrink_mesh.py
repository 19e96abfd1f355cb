"""Chooses a small mesh that uses the same axes as a large one. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from paralign.config.run import RunConfig
from paralign.errors import ConfigError
from paralign.mesh import CARVED, MESH_AXES, Degrees, divisors

LAPTOP_RANKS = 8  # that two cores start and step in seconds

# Which axis stays first where there are too few ranks for all. What dp_replicate does, dp_shard
# does as well (rows), and what dp_shard does, cp does (parameters are sharded over both).
_IMPORTANCE = ("tp", "pp", "ep", "cp", "dp_shard", "dp_replicate")


def small_meshes(config: RunConfig, world_size: int | None) -> list[Degrees]:
    """Return meshes of ``world_size`` ranks in which no axis has more than in ``config``.

    The best come first: those that keep most axes above 1, then those whose experts keep FSDP
    beside ep, and ep its reach over tp, then those with even degrees.

    Args:
        config: The run with the large mesh.
        world_size: None: the most that can be, up to :data:`LAPTOP_RANKS`.

    Raises:
        ConfigError: No such mesh has so many ranks.
    """
    large = config.mesh.degrees
    if world_size is None:
        world_size = max(n for n in range(1, LAPTOP_RANKS + 1) if any(_meshes(large, n)))
    found = list(_meshes(large, world_size))
    if not found:
        numbers = [n for n in range(1, large.world_size + 1) if any(_meshes(large, n))]
        below = [n for n in numbers if n < world_size][-1:]
        above = [n for n in numbers if n > world_size][:1]
        near = " or ".join(str(n) for n in below + above)
        raise ConfigError(
            f"--world={world_size} with --shrink: no mesh of {world_size} ranks has at most as "
            f"many on every axis as the config's {large}. Use --world {near}."
        )
    degree = config.context.ulysses_degree
    is_hybrid = degree is not None and 1 < degree < large.cp
    return sorted(found, key=lambda small: _rank(large, small, is_hybrid), reverse=True)


def lost_axes(large: Degrees, small: Degrees) -> list[str]:
    """Return the axes that only the large mesh has above 1."""
    axes = [*map(str, MESH_AXES), "ep", "efsdp"] if large.ep > 1 else list(map(str, MESH_AXES))
    return [a for a in axes if getattr(large, a) > 1 and getattr(small, a) == 1]


def _meshes(large: Degrees, world_size: int) -> Iterator[Degrees]:
    names = [str(axis) for axis in MESH_AXES]
    most = [large.degree(name) for name in names]
    choices = [[d for d in divisors(world_size) if d <= degree] for degree in most]
    for degrees in itertools.product(*choices):
        if math.prod(degrees) == world_size:
            small = dict(zip(names, degrees, strict=True))
            carved = math.prod(small[str(axis)] for axis in CARVED)
            for ep in divisors(carved):
                if ep <= large.ep:
                    yield Degrees(ep=ep, **small)


def _rank(large: Degrees, small: Degrees, is_hybrid: bool) -> tuple[object, ...]:
    lost = lost_axes(large, small)
    names = [str(axis) for axis in MESH_AXES]
    kept = [small.degree(name) for name in names if large.degree(name) > 1]
    by_size = sum(small.degree(name) * large.degree(name) for name in names)
    return (
        -len([axis for axis in lost if axis != "efsdp"]),
        *(axis not in lost for axis in _IMPORTANCE),
        "efsdp" not in lost,
        (small.ep > small.tp) == (large.ep > large.tp),
        (small.cp > 2) == is_hybrid,  # gathered and swapped at once needs four ranks
        -max(kept, default=1),
        by_size,
        small.ep,
    )
