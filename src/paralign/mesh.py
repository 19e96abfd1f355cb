"""Named mesh axes: how many ranks each has, and the one ``DeviceMesh`` they become.

Ranks are numbered with pp outermost and tp innermost. For ``Degrees(pp=2, dp_shard=2, cp=2)``::

    rank      0  1  2  3  4  5  6  7
    pp        0  0  0  0  1  1  1  1
    dp_shard  0  0  1  1  0  0  1  1
    cp        0  1  0  1  0  1  0  1

Nothing here imports torch until a mesh is built, so that a wrong config is refused quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING

from paralign.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Axis(str, Enum):
    """The names of the mesh axes and of the views derived from them."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"
    EP = "ep"
    EFSDP = "efsdp"  # what ep leaves of dp_shard x cp x tp: experts are sharded over it
    FSDP = "fsdp"  # dp_shard x cp: parameters are sharded and gradients summed over it
    LOSS = "loss"  # dp_replicate x dp_shard x cp: tokens are split over it
    SEQUENCE = "sequence"  # cp x tp: what routers see of a sequence is split over it
    ROUTED = "routed"  # dp_replicate x dp_shard x cp x tp: what routers see is split over it

    __str__ = str.__str__


MESH_AXES = (Axis.PP, Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP)


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How many ranks each mesh axis has. 1 means the axis is off.

    Raises:
        MeshError: A degree is not a whole number of at least 1, or ``ep`` does not divide
            ``dp_shard * cp * tp``. All problems are listed.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1  # carved out of dp_shard * cp * tp, so it adds no ranks

    def __post_init__(self) -> None:
        problems = [
            f"{field.name}={value!r} must be a whole number of at least 1"
            for field in fields(self)
            if not isinstance(value := getattr(self, field.name), int)
            or isinstance(value, bool)
            or value < 1
        ]
        if not problems and (self.dp_shard * self.cp * self.tp) % self.ep:
            carved = self.dp_shard * self.cp * self.tp
            problems.append(
                f"ep={self.ep} is carved out of dp_shard * cp * tp = {carved} and must divide it. "
                f"Use ep in {{{', '.join(str(d) for d in divisors(carved))}}}"
            )
        if problems:
            raise MeshError.from_problems(f"cannot build a mesh from {self}", problems)

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all degrees but ``ep``."""
        return math.prod(self.degree(axis) for axis in MESH_AXES)

    @property
    def dp(self) -> int:
        """Number of ranks that hold different rows of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks that a parameter is sharded over: ``dp_shard * cp``."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks that an expert is sharded over: ``dp_shard * cp * tp / ep``."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def spreads_experts(self) -> bool:
        """Whether experts lie on a mesh of their own, ``efsdp x ep``."""
        return self.ep > 1 or self.tp > 1

    def degree(self, axis: str) -> int:
        """Return the size of ``axis``."""
        return int(getattr(self, str(axis)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on every mesh axis."""
        indices: dict[str, int] = {}
        for axis in reversed(MESH_AXES):
            rank, indices[str(axis)] = divmod(rank, self.degree(axis))
        return {str(axis): indices[str(axis)] for axis in MESH_AXES}

    def describe_rank(self, rank: int) -> str:
        """Return ``"rank 5: pp=1 dp_shard=0 cp=1"``, leaving out axes of size 1."""
        parts = [f"{a}={i}" for a, i in self.coordinates(rank).items() if self.degree(a) > 1]
        return f"rank {rank}: {' '.join(parts)}" if parts else f"rank {rank}"

    def check_world_size(self, world_size: int) -> None:
        """Raise ``MeshError`` unless the degrees multiply to ``world_size``."""
        if self.world_size != world_size:
            product = " * ".join(f"{axis}={self.degree(axis)}" for axis in MESH_AXES)
            raise MeshError(
                f"world size {world_size} does not match the mesh: {product} = {self.world_size}. "
                f"Start {self.world_size} ranks or change the degrees so that they multiply to "
                f"{world_size}."
            )


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in increasing order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def build_mesh(degrees: Degrees, device_type: str = "cpu") -> DeviceMesh:
    """Build the one ``DeviceMesh`` of a run, with the axes of :data:`MESH_AXES` by name.

    Size-1 axes are kept: they take the same code path as any other. The folded views are built with
    it, see :func:`fold`.

    Comm:
        Creates process groups: collective over the world.

    Raises:
        MeshError: The degrees do not multiply to the world size.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    degrees.check_world_size(dist.get_world_size())
    names = tuple(str(axis) for axis in MESH_AXES)
    sizes = tuple(degrees.degree(axis) for axis in MESH_AXES)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    for view in FOLDS:
        fold(mesh, view)
    if degrees.spreads_experts:
        _carve(mesh, degrees)
    return mesh


def _carve(mesh: DeviceMesh, degrees: Degrees) -> None:
    """Keep the mesh of experts with the mesh it is carved from, which has no axis for it."""
    inner = mesh[tuple(str(axis) for axis in CARVED)]._flatten("carved")
    sizes = (degrees.efsdp, degrees.ep)
    vars(mesh)[_EXPERTS] = inner._unflatten(0, sizes, (str(Axis.EFSDP), str(Axis.EP)))


def expert_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh ``efsdp x ep`` of a mesh that was built with ``ep > 1`` or ``tp > 1``.

    For ``Degrees(dp_shard=2, cp=2, ep=2)``::

        rank      0  1  2  3
        dp_shard  0  0  1  1
        cp        0  1  0  1
        efsdp     0  0  1  1
        ep        0  1  0  1

    Comm:
        none.

    Raises:
        MeshError: It was built without.
    """
    if _EXPERTS not in vars(mesh):
        raise MeshError(
            "the mesh has no axis 'ep'. Build it with pa.build_mesh(pa.Degrees(..., ep=...))."
        )
    found: DeviceMesh = vars(mesh)[_EXPERTS]
    return found


# What ep is carved out of, outermost first; ep is innermost, so that its ranks are neighbours.
CARVED = (Axis.DP_SHARD, Axis.CP, Axis.TP)
_EXPERTS = "_paralign_experts"

# Axes that are folded into one, outermost first.
FOLDS = {
    Axis.FSDP: (Axis.DP_SHARD, Axis.CP),
    Axis.LOSS: (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP),
    Axis.SEQUENCE: (Axis.CP, Axis.TP),
    Axis.ROUTED: (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP, Axis.TP),
}


def fold(mesh: DeviceMesh, view: Axis) -> DeviceMesh:
    """Return the 1-D mesh of a folded view: one of :data:`FOLDS`.

    Comm:
        Creates a process group the first time, which ``build_mesh`` does; none afterwards.
    """
    return mesh[tuple(str(axis) for axis in FOLDS[view])]._flatten(str(view))


def degrees_of(mesh: DeviceMesh) -> Degrees:
    """Return the degrees that ``mesh`` was built from.

    Raises:
        MeshError: The mesh lacks one of the axes that ``build_mesh`` makes.
    """
    names = mesh.mesh_dim_names or ()
    if missing := [str(axis) for axis in MESH_AXES if str(axis) not in names]:
        raise MeshError(
            f"the mesh has axes {tuple(names)} and lacks {', '.join(missing)}. "
            "Build it with pa.build_mesh(pa.Degrees(...))."
        )
    ep = expert_mesh(mesh)[str(Axis.EP)].size() if _EXPERTS in vars(mesh) else 1
    return Degrees(ep=ep, **{str(axis): mesh[str(axis)].size() for axis in MESH_AXES})
