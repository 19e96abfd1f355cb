"""How a parameter is spread over the tp axis, and the DTensors that say so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from paralign.local_weights import distribute, local_of
from paralign.mesh import CARVED, Axis


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What a rank of tp holds of one parameter.

    Attributes:
        dim: The dim that is cut into equal parts; None: every rank holds all of it.
        is_partial: Each rank's gradient is that of its own tokens or heads, so that the gradient is
            their sum; False: it is whole as it comes.
    """

    dim: int | None
    is_partial: bool = False

    @property
    def placement(self) -> Placement:
        """The same, as torch says it."""
        return Replicate() if self.dim is None else Shard(self.dim)

    def __str__(self) -> str:
        return "replicate" if self.dim is None else f"shard({self.dim})"


def spread_(module: nn.Module, spreads: Mapping[str, Spread], mesh: DeviceMesh) -> None:
    """Replace parameters of ``module`` by DTensors over a 1-D mesh; every rank has equal ones.

    Two names of one parameter are two names of one DTensor. DTensors are left as they are.

    Args:
        module: What holds the parameters.
        spreads: Name inside ``module`` -> how it is spread.
        mesh: The mesh of the axis.
    """
    made: dict[int, nn.Parameter] = {}
    for name, spread in spreads.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = owner._parameters[leaf]
        assert parameter is not None
        if isinstance(parameter, DTensor):
            continue
        if id(parameter) not in made:
            made[id(parameter)] = distribute(parameter, spread.placement, mesh)
        owner.register_parameter(leaf, made[id(parameter)])


def is_replicated(parameter: Tensor, axis: str) -> bool:
    """Whether every rank of ``axis`` holds the same part of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    if str(axis) not in names:
        # Experts lie on axes that tp is folded into.
        return not (str(Axis.EFSDP) in names and str(axis) in map(str, CARVED))
    return isinstance(parameter.placements[names.index(str(axis))], Replicate)


def sum_partial_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace the gradients of parameters that every rank holds by their sums over the ranks.

    Comm:
        One all-reduce (sum) of all of them, packed, for each dtype; with FSDP of the shards.
    """
    grads = [local_of(p.grad) for p in parameters if p.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        chosen = [grad for grad in grads if grad.dtype == dtype]
        packed = torch.cat([grad.flatten() for grad in chosen])
        dist.all_reduce(packed, group=group)
        for grad, total in zip(
            chosen, packed.split([grad.numel() for grad in chosen]), strict=True
        ):
            grad.copy_(total.view_as(grad))
