"""Parameters as DTensors on one mesh axis; modules that compute on what a rank holds of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard


def distribute(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> nn.Parameter:
    """Return ``parameter``, which every rank holds whole, as a DTensor over a 1-D mesh.

    Unlike ``torch.distributed.tensor.distribute_tensor`` nothing is sent, and it works on the meta
    device too.
    """
    whole = parameter.detach()
    local = whole
    if isinstance(placement, Shard):
        local = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    # A copy of its own: a view would keep the whole parameter alive.
    local = local.clone(memory_format=torch.contiguous_format)
    dtensor = DTensor.from_local(
        local,
        mesh,
        [placement],
        run_check=False,
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )
    return nn.Parameter(dtensor, requires_grad=parameter.requires_grad)


def local_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor that this rank holds of a DTensor, with its gradient."""
    if isinstance(tensor, DTensor):
        local: Tensor = tensor.to_local()
        return local
    return tensor


@contextmanager
def parameters_seen_as(
    module: nn.Module, see: Callable[[str, nn.Parameter], Tensor | None]
) -> Iterator[None]:
    """Let ``module``, and everything below it, see other tensors in place of its parameters.

    Args:
        module: What computes inside the block.
        see: Leaf name and parameter -> what is seen of it; None hides it.
    """
    held = [
        (owner, leaf, parameter)
        for owner in module.modules()
        for leaf, parameter in owner._parameters.items()
        if parameter is not None
    ]
    try:
        for owner, leaf, parameter in held:
            # A plain tensor is not what the dict is declared to hold, but what forward reads.
            owner._parameters[leaf] = see(leaf, parameter)  # type: ignore[assignment]
        yield
    finally:
        for owner, leaf, parameter in held:
            owner._parameters[leaf] = parameter


def local_parameters(
    module: nn.Module, *, rows: tuple[int, int] | None = None, without: str | None = None
) -> AbstractContextManager[None]:
    """Let ``module`` see plain local tensors where it holds DTensors, with gradients.

    Args:
        module: Itself and everything below it.
        rows: Start and length of the rows to see of each parameter; None: all.
        without: Leaf name of a parameter to hide.
    """

    def see(leaf: str, parameter: nn.Parameter) -> Tensor | None:
        if leaf == without:
            return None
        local = local_of(parameter)
        return local if rows is None else local.narrow(0, *rows)

    return parameters_seen_as(module, see)
