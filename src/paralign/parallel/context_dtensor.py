"""Unwrap q, k and v that are DTensors, and wrap the output like q.

Over the context-parallel axis a DTensor must be sharded on tokens; over any other axis it may be
sharded on heads (tensor parallel) or rows, or be replicated. Attention then runs on the local
pieces: they never need to meet over those axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from paralign.errors import LayoutError
from paralign.parallel.context_call import QKV
from paralign.parallel.context_rules import NUM_DIMS

PARTIAL_HINT = (
    "a Partial here usually means head_dim points at the axis that attention contracts (the "
    "features of a head) instead of the one that counts heads"
)


@dataclass(frozen=True, kw_only=True)
class Wrapping:
    """How q was placed, for the output and for masks."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]
    head_offset: int  # global index of this rank's first head

    def wrap(self, output: Tensor) -> DTensor:
        """Return the output as a DTensor placed like q; its last dim is the output's own."""
        shape = (*self.global_shape[:-1], output.shape[-1])
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return DTensor.from_local(
            output,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )


def unwrap(
    qkv: Sequence[Tensor], *, seq_dim: int, head_dim: int, axis: str, group: dist.ProcessGroup
) -> tuple[list[Tensor], Wrapping | None]:
    """Return this rank's plain q, k and v, and how to wrap the output; None: they were plain.

    Raises:
        LayoutError: Some are DTensors and some are not, they are placed differently, or a placement
            would make attention on the local pieces wrong.
    """
    placed = [(name, x) for name, x in zip(QKV, qkv, strict=True) if isinstance(x, DTensor)]
    if not placed:
        return list(qkv), None
    if len(placed) != len(QKV):
        names = " and ".join(name for name, _ in placed)
        raise LayoutError(
            f"{names} {'is a DTensor' if len(placed) == 1 else 'are DTensors'} and the rest of q, "
            "k, v is not. Make all of them DTensors or call .to_local() on those that are."
        )
    degree = dist.get_world_size(group)
    problems = [
        problem
        for name, x in placed
        for problem in _placement_problems(name, x, seq_dim, head_dim, axis, degree, group)
    ]
    q = placed[0][1]
    # Comparing them is only worth it when each is right by itself.
    for name, x in [] if problems else placed[1:]:
        if x.device_mesh != q.device_mesh or x.placements != q.placements:
            problems.append(
                f"{name} is placed {x.placements} on {_mesh_text(x.device_mesh)} and q is placed "
                f"{q.placements} on {_mesh_text(q.device_mesh)}. Place q, k and v alike, so that "
                "each rank holds the K/V heads that belong to its query heads"
            )
    if problems:
        title = f"context parallel over axis {axis!r} ({degree} ranks) cannot take these DTensors"
        raise LayoutError.from_problems(title, problems)
    wrapping = Wrapping(
        mesh=q.device_mesh,
        placements=tuple(q.placements),
        global_shape=tuple(q.shape),
        head_offset=_head_offset(q, head_dim),
    )
    return [x.to_local() for _, x in placed], wrapping


def unwrap_mask(mask: Any) -> Any:
    """Return a replicated DTensor mask as the plain tensor it is; anything else as it came.

    Raises:
        LayoutError: The mask is a DTensor that is sharded or partial, or one that needs a gradient.
    """
    if not isinstance(mask, DTensor):
        return mask
    if mask.requires_grad or not all(isinstance(p, Replicate) for p in mask.placements):
        raise LayoutError(
            f"mask is a DTensor placed {mask.placements}, requires_grad={mask.requires_grad}; pass "
            "the whole mask, replicated and without a gradient, or as a plain tensor."
        )
    return mask.to_local()


def _placement_problems(
    name: str,
    x: DTensor,
    seq_dim: int,
    head_dim: int,
    axis: str,
    degree: int,
    group: dist.ProcessGroup,
) -> list[str]:
    if x.ndim != NUM_DIMS:
        return []  # reported with the other sizes
    splittable = set(range(NUM_DIMS - 1)) - {seq_dim}  # heads and rows
    problems = []
    over_seq = _find_axis(x.device_mesh, axis, group)
    for index, placement in enumerate(x.placements):
        size = x.device_mesh.size(index)
        at = (
            f"{name} is {placement!r} over axis {_axis_name(x.device_mesh, index)!r} ({size} ranks)"
        )
        if size == 1 and not isinstance(placement, Partial):
            continue
        problem = (
            _sequence_axis_problem(placement, seq_dim)
            if index == over_seq
            else _other_axis_problem(placement, head_dim, splittable)
        )
        if problem:
            problems.append(f"{at}: {problem}")
        elif isinstance(placement, Shard) and x.shape[placement.dim] % size:
            problems.append(
                f"{at}, which does not divide its shape {list(x.shape)} evenly on dim "
                f"{placement.dim}"
            )
    return problems


def _sequence_axis_problem(placement: Placement, seq_dim: int) -> str:
    if isinstance(placement, Partial):
        return PARTIAL_HINT
    if isinstance(placement, Replicate):
        return (
            "that is the whole sequence on every rank. Feed each rank its slice: "
            f"x.redistribute(placements=[Shard({seq_dim})]), or split the batch before the model"
        )
    if type(placement) is not Shard or placement.dim != seq_dim:
        return f"it must be Shard({seq_dim}), the dim that counts tokens (seq_dim)"
    return ""


def _other_axis_problem(placement: Placement, head_dim: int, splittable: set[int]) -> str:
    if isinstance(placement, Replicate) or (
        type(placement) is Shard and placement.dim in splittable
    ):
        return ""
    if isinstance(placement, Partial):
        return f"reduce it before attention; {PARTIAL_HINT}"
    return (
        f"attention on the local piece would be wrong. Shard it on heads (Shard({head_dim})) or "
        "rows, or replicate it"
    )


def _find_axis(mesh: DeviceMesh, axis: str, group: dist.ProcessGroup) -> int | None:
    """Return which dim of ``mesh`` is the context-parallel axis: by name, else by its ranks."""
    names = mesh.mesh_dim_names or ()
    if axis in names:
        return names.index(axis)
    ranks = dist.get_process_group_ranks(group)
    same = (dist.get_process_group_ranks(mesh.get_group(i)) == ranks for i in range(mesh.ndim))
    return next((i for i, is_same in enumerate(same) if is_same and len(ranks) > 1), None)


def _axis_name(mesh: DeviceMesh, index: int) -> str:
    return mesh.mesh_dim_names[index] if mesh.mesh_dim_names else str(index)


def _mesh_text(mesh: DeviceMesh) -> str:
    return f"a mesh of axes {mesh.mesh_dim_names} and shape {tuple(mesh.shape)}"


def _head_offset(q: DTensor, head_dim: int) -> int:
    coordinate = q.device_mesh.get_coordinate()
    index, count = 0, 1
    for i, placement in enumerate(q.placements):
        if isinstance(placement, Shard) and placement.dim == head_dim and coordinate is not None:
            size = q.device_mesh.size(i)
            index, count = index * size + coordinate[i], count * size
    return index * (q.shape[head_dim] // count)
