"""Axes of a mesh whose ranks have two sets of coordinates."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from paralign.align.explain.context import MeshAxes


def mesh_of(**degrees: int) -> MeshAxes:
    """pp x dp_shard x tp, and efsdp x ep over the ranks of a stage."""
    pp, dp, tp, ep = (degrees[axis] for axis in ("pp", "dp_shard", "tp", "ep"))
    stage = dp * tp
    ranks: list[Any] = []
    for p, d, t in itertools.product(range(pp), range(dp), range(tp)):
        first, own = p * stage, d * tp + t
        ranks.append(
            SimpleNamespace(
                rank=first + own,
                axes={
                    "pp": [own + stage * i for i in range(pp)],
                    "dp_shard": [first + tp * i + t for i in range(dp)],
                    "tp": [first + d * tp + i for i in range(tp)],
                    "efsdp": [first + own % ep + ep * i for i in range(stage // ep)],
                    "ep": [first + own // ep * ep + i for i in range(ep)],
                },
            )
        )
    trace: Any = SimpleNamespace(ranks=ranks, world_size=len(ranks))
    return MeshAxes(trace)


def test_axes_of_experts_are_a_second_grid():
    mesh = mesh_of(pp=2, dp_shard=3, tp=2, ep=3)
    assert mesh.live == ["pp", "dp_shard", "tp"]
    assert mesh.others(["tp"]) == ["pp", "dp_shard"]
    assert mesh.others(["ep"]) == ["pp", "efsdp"]
    assert mesh.others(["pp"]) == ["dp_shard", "tp"]
    singles = [axes for axes in mesh.subsets() if len(axes) == 1]
    assert singles == [("pp",), ("dp_shard",), ("tp",), ("efsdp",), ("ep",)]
    assert ("dp_shard", "ep") not in mesh.subsets()
    assert mesh.peers(4, ["ep"]) == (3, 4, 5)
    assert mesh.peers(4, mesh.others(["ep"])) == (1, 4, 7, 10)


def test_ranks_are_told_apart_by_the_axes_of_one_grid():
    mesh = mesh_of(pp=2, dp_shard=3, tp=2, ep=3)
    everyone = range(12)
    assert mesh.coordinates_that_tell([0, 2, 4, 6, 8, 10], everyone) == ("tp",)
    assert mesh.coordinates_that_tell([0, 3, 6, 9], everyone) == ("ep",)
    assert mesh.axes_of([3, 4, 5]) == ("ep",)
    assert mesh.axes_of([0, 2]) == ("dp_shard",)


def test_without_experts_there_is_one_grid():
    mesh = mesh_of(pp=2, dp_shard=3, tp=2, ep=1)
    assert mesh.live == ["pp", "dp_shard", "tp"]
    assert mesh.others(["pp", "tp"]) == ["dp_shard"]
    assert len(mesh.subsets()) == 7
