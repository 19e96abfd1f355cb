"""Which meshes of so many ranks fit a config: what an error about their number offers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice, product

from paralign.config.run import RunConfig
from paralign.mesh import MESH_AXES, divisors

# Meshes that are tried before giving up: a large number of ranks has thousands.
MOST_TRIED = 100


def fitting_meshes(
    config: RunConfig,
    world_size: int,
    *,
    is_sound: Callable[[RunConfig], bool],
    most: int = 5,
) -> list[str]:
    """Return meshes of ``world_size`` ranks that ``config`` can have, nearest to its own first.

    ``ep`` is the largest part of the config's that the axes it is carved out of allow.

    Args:
        config: The run.
        world_size: Ranks.
        is_sound: Whether a config breaks no rule.
        most: Meshes to return.

    Returns:
        Such as ``{dp_shard: 2, tp: 2, ep: 2}``, as RUN.yaml takes it.
    """
    tried = islice(_changed(config, world_size), MOST_TRIED)
    return [_shown(one) for one in islice(filter(is_sound, tried), most)]


def _changed(config: RunConfig, world_size: int) -> Iterator[RunConfig]:
    """Yield the config with every mesh, the fewest and smallest changes first."""
    names = [str(axis) for axis in MESH_AXES]
    own = [getattr(config.mesh, name) for name in names]

    def distance(degrees: tuple[int, ...]) -> tuple[int, float]:
        pairs = list(zip(own, degrees, strict=True))
        return sum(a != b for a, b in pairs), sum(abs(math.log(a / b)) for a, b in pairs)

    found = product(divisors(world_size), repeat=len(names))
    for degrees in sorted((d for d in found if math.prod(d) == world_size), key=distance):
        axes = dict(zip(names, degrees, strict=True))
        ep = math.gcd(config.mesh.ep, axes["dp_shard"] * axes["cp"] * axes["tp"])
        yield config.model_copy(update={"mesh": config.mesh.model_copy(update={**axes, "ep": ep})})


def _shown(config: RunConfig) -> str:
    degrees = {name: degree for name, degree in config.mesh if degree > 1}
    return f"{{{', '.join(f'{name}: {degree}' for name, degree in degrees.items())}}}"
