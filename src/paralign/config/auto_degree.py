"""``mesh.dp_shard: auto``: as many ranks as the world has room for beside the other axes.

A run that torchrun restarts with fewer machines, or more, goes on with the ranks that there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

AUTO = "auto"
_OTHERS = ("pp", "dp_replicate", "cp", "tp")


def fill_auto_degree(
    raw: Mapping[str, Any], world_size: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Return ``raw`` with a number in place of ``auto``, and what is wrong with it.

    Args:
        raw: Sections by name, as YAML gives them; not checked yet.
        world_size: Number of ranks that exist already; None: there are none.

    Returns:
        The config, with a degree of 1 where there is no right one, and problems.
    """
    mesh = raw.get("mesh")
    if not isinstance(mesh, Mapping) or mesh.get("dp_shard") != AUTO:
        return raw, []
    others = {axis: mesh.get(axis, 1) for axis in _OTHERS}
    sizes = [size for size in others.values() if isinstance(size, int) and size > 0]
    problems: list[str] = []
    degree = 1
    if world_size is None:
        problems.append(
            "mesh.dp_shard='auto' is what the other axes leave of torchrun's ranks, and torchrun "
            "has started none. Give a number, here or as an override: mesh.dp_shard=2."
        )
    elif len(sizes) == len(others):  # else what is wrong with them is told by itself
        inner = math.prod(sizes)
        degree = max(world_size // inner, 1)
        if degree * inner != world_size:
            told = " * ".join(f"{axis}={size}" for axis, size in others.items())
            problems.append(
                f"mesh.dp_shard='auto': {world_size} ranks are no multiple of {told}, which is "
                f"{inner}. Start a multiple of {inner} ranks, or change the other axes."
            )
    return {**raw, "mesh": {**mesh, "dp_shard": degree}}, problems
