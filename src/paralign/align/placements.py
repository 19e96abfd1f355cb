"""Where a tensor's local piece belongs: read from a DTensor by its interface, not its class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from paralign.errors import ConfigError, LayoutError
from paralign.layout import LocalMap, is_partial, local_boxes, whole


@dataclass(frozen=True)
class Placed:
    """A piece: its local tensor and what it is of the global one."""

    local: Tensor
    shape: tuple[int, ...]
    map: LocalMap
    replicated_over: tuple[str, ...]
    partial_over: tuple[str, ...]
    partial_op: str


# Along these a plain tensor has no copies: other layers, other experts.
_OTHERS = ("pp", "ep")


def is_dtensor(tensor: Any) -> bool:
    """Say whether ``tensor`` has a DTensor's interface, whichever library it comes from."""
    return all(hasattr(tensor, name) for name in ("placements", "device_mesh", "to_local"))


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local.detach()


class RankAxes:
    """This rank's place on every mesh axis seen so far: its coordinate and the ranks of its group.

    Args:
        mesh: The run's mesh: a ``DeviceMesh`` with names, or axis name -> process group or
            ``(index, size)``, or None to know only the meshes that DTensors bring along.

    Raises:
        ConfigError: The mesh has no axis names, or this rank is not on it.
    """

    def __init__(self, mesh: Any = None) -> None:
        self.coordinates: dict[str, int] = {}
        self.groups: dict[str, list[int]] = {}
        self._meshes: dict[int, tuple[Any, list[str]]] = {}
        # A layout is worked out once: a run places the same parameters in every step.
        self._placed: dict[tuple[object, ...], Placed] = {}
        self.sizes: dict[str, int] = {}
        """Of axes given as (index, size), whose ranks the others have to tell."""
        if isinstance(mesh, Mapping):
            for axis, group in mesh.items():
                if isinstance(group, tuple | list):
                    self._add_index(str(axis), group)
                else:
                    self._add_group(str(axis), group)
        elif mesh is not None:
            self._add_mesh(mesh)
        self.run_axes = tuple(dict.fromkeys([*self.groups, *self.sizes]))

    @property
    def unresolved(self) -> bool:
        """Whether axes were given as (index, size), so that their ranks are to be found."""
        return bool(self.sizes)

    def resolve(self, coordinates: Mapping[int, Mapping[str, int]]) -> None:
        """Find the ranks of axes given as (index, size): those that differ only along the axis.

        Args:
            coordinates: The coordinates of every rank.

        Raises:
            ConfigError: The ranks do not make up a full mesh.
        """
        self._placed.clear()  # they name the axes that were known
        by_place: dict[tuple[int, ...], int] = {}
        problems = []
        for rank, at in sorted(coordinates.items()):
            place = tuple(at.get(axis, 0) for axis in self.run_axes)
            if place in by_place:
                named = ", ".join(f"{a}={i}" for a, i in zip(self.run_axes, place, strict=True))
                problems.append(f"ranks {by_place[place]} and {rank} are both at {named}")
            by_place[place] = rank
        own = [self.coordinates[axis] for axis in self.run_axes]
        for axis, size in self.sizes.items():
            dim = self.run_axes.index(axis)
            places = [tuple([*own[:dim], index, *own[dim + 1 :]]) for index in range(size)]
            if absent := [index for index, place in enumerate(places) if place not in by_place]:
                problems.append(f"mesh[{axis!r}] has size {size}, but no rank is at {absent[0]}")
                continue
            self.groups[axis] = [by_place[place] for place in places]
        if problems:
            problems.append("Give (index, size) of every axis of the run, also of dp")
            raise ConfigError.from_problems("mesh= does not describe the ranks", problems)

    def place(self, tensor: Tensor) -> Placed:
        """Describe the piece of ``tensor`` that this rank holds; communicates nothing.

        Raises:
            LayoutError: Its placements are of a kind that cannot be described.
        """
        if not is_dtensor(tensor):
            return Placed(
                tensor.detach(),
                tuple(tensor.shape),
                whole(tensor.shape),
                tuple(
                    axis for axis in self.run_axes if axis not in _OTHERS and self.size(axis) > 1
                ),
                (),
                "sum",
            )
        dtensor: Any = tensor
        mesh, placements = dtensor.device_mesh, tuple(dtensor.placements)
        local = local_of(tensor)
        names = self._add_mesh(mesh)  # holds the mesh, so that no other one gets its id
        key = (id(mesh), str(placements), tuple(tensor.shape), tuple(local.shape))
        known = self._placed.get(key)
        if known is not None:
            return replace(known, local=local)
        partial_over, partial_op = _partial(names, placements)
        placed = Placed(
            local.new_empty(0),
            tuple(tensor.shape),
            local_boxes(
                tuple(tensor.shape),
                placements,
                tuple(mesh.mesh.shape),
                _coordinate(mesh),
                held_shape=tuple(local.shape),
            ),
            self._replicated_over(mesh, names, placements),
            partial_over,
            partial_op,
        )
        self._placed[key] = placed
        return replace(placed, local=local)

    def _replicated_over(
        self, mesh: Any, names: Sequence[str], placements: Sequence[Any]
    ) -> tuple[str, ...]:
        """Axes along which other ranks hold the same piece, the run's own axes first."""
        replicate = [type(placement).__name__ == "Replicate" for placement in placements]
        ranks = mesh.mesh.flatten().tolist()
        coordinate_of = {
            rank: tuple(at) for rank, at in zip(ranks, _all_coordinates(mesh), strict=True)
        }
        axes = []
        for axis in self.run_axes:
            group = self.groups[axis]
            if not all(rank in coordinate_of for rank in group):
                # The tensor's mesh does not know this axis: a copy of the mesh per coordinate.
                # Along pp these copies are other layers.
                same = axis != "pp"
            else:
                spread = zip(*(coordinate_of[rank] for rank in group), strict=True)
                moves = [len(set(indices)) > 1 for indices in spread]
                same = all(replicate[dim] for dim, moved in enumerate(moves) if moved)
            if same and len(group) > 1:
                axes.append(axis)
        axes += [
            name
            for name, copied in zip(names, replicate, strict=True)
            if copied and name not in self.run_axes and self.size(name) > 1
        ]
        return tuple(axes)

    def replicas_outside(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Axes that hold copies of a tensor split over ``ranks``; none of them is pp."""
        split = set(ranks)
        return tuple(
            axis
            for axis in self.run_axes
            if axis not in _OTHERS
            and self.size(axis) > 1
            and len(split & set(self.groups[axis])) < 2
        )

    def names_of(self, mesh: Any) -> list[str]:
        """Return the names that the axes of a DTensor's mesh have here."""
        return self._add_mesh(mesh)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return len(self.groups[axis])

    def _add_index(self, axis: str, given: Sequence[Any]) -> None:
        index, size = given if len(given) == 2 else (None, None)
        if not isinstance(index, int) or not isinstance(size, int) or not 0 <= index < size:
            raise ConfigError(
                f"mesh[{axis!r}]={given!r} must be (index, size) with 0 <= index < size, a process "
                "group, or give a DeviceMesh for all axes."
            )
        self.coordinates[axis] = index
        self.sizes[axis] = size

    def _add_group(self, axis: str, group: Any) -> None:
        import torch.distributed as dist

        if isinstance(group, int):
            raise ConfigError(
                f"mesh[{axis!r}]={group!r} is neither a process group nor (index, size). Give one "
                "of them per axis, or a DeviceMesh for all."
            )
        self.groups[axis] = dist.get_process_group_ranks(group)
        self.coordinates[axis] = dist.get_rank(group)

    def _add_mesh(self, mesh: Any) -> list[str]:
        """Take in the axes of a mesh and return the names they have here."""
        # The mesh itself is kept too: an id is only unique while its object lives.
        if id(mesh) in self._meshes:
            return self._meshes[id(mesh)][1]
        coordinate = _coordinate(mesh)
        given = mesh.mesh_dim_names or tuple(f"axis{dim}" for dim in range(len(coordinate)))
        names = []
        for dim, name in enumerate(given):
            index = (*coordinate[:dim], slice(None), *coordinate[dim + 1 :])
            names.append(self._add_axis(str(name), mesh.mesh[index].tolist(), coordinate[dim]))
        self._meshes[id(mesh)] = (mesh, names)
        return names

    def _add_axis(self, name: str, ranks: list[int], coordinate: int) -> str:
        """Add an axis; one whose name already means other ranks gets a number."""
        unique, number = name, 2
        while self.groups.get(unique, ranks) != ranks:
            unique, number = f"{name}#{number}", number + 1
        self.groups[unique] = ranks
        self.coordinates[unique] = coordinate
        return unique


def _partial(names: Sequence[str], placements: Sequence[Any]) -> tuple[tuple[str, ...], str]:
    pending = {
        name: placement
        for name, placement in zip(names, placements, strict=True)
        if is_partial(placement)
    }
    ops = {str(placement.reduce_op) for placement in pending.values()}
    kinds = {type(placement).__name__ for placement in pending.values()}
    if len(ops) > 1 or not ops <= {"sum", "avg"} or not kinds <= {"Partial"}:
        raise LayoutError(
            f"placements={tuple(placements)} leave a reduction pending that is neither one sum nor "
            "one avg, so the value cannot be put together from the ranks' pieces. Redistribute the "
            "tensor to Replicate or Shard first."
        )
    return tuple(pending), next(iter(ops), "sum")


def _coordinate(mesh: Any) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ConfigError(
            f"this rank is not on the mesh {mesh}. Record with a mesh that holds every recording "
            "rank."
        )
    return tuple(coordinate)


def _all_coordinates(mesh: Any) -> list[list[int]]:
    """Return the coordinate of every rank of a mesh, in the order of ``mesh.mesh.flatten()``."""
    coordinates: list[list[int]] = (mesh.mesh == mesh.mesh).nonzero().tolist()
    return coordinates
