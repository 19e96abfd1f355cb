"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back.

::

    rank 0: experts 0-1     tokens a b c      a -> 0, 3    b -> 2, 3    c -> 1
    rank 1: experts 2-3     tokens d          d -> 0, 2

    dispatch   rank 0 has a c d (for experts 0, 1)     rank 1 has a b d (for experts 2, 3)
    combine    each rank sends back the weighted sum over its experts, and the token's owner adds up

A token goes to a rank once, however many of its experts are there, and one row comes back: these
are the fewest rows that can travel. Nothing is dropped or padded; a rank may get no token.

Ref:
    Lepikhin et al., "GShard: Scaling Giant Models with Conditional Computation and Automatic
    Sharding", 2020. https://arxiv.org/abs/2006.16668
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from paralign.collectives import all_to_all_rows
from paralign.contiguous import in_shape_of
from paralign.errors import LayoutError
from paralign.local_weights import distribute, local_parameters

NOT_HERE = -1
"""The index of a choice that another rank computes."""


class Route(NamedTuple):
    """Where the rows of one call go.

    Attributes:
        token: ``[R]``, the token of each row that leaves; first those for rank 0.
        indices: ``[R, K]``, its choices as numbers on the receiving rank, or ``NOT_HERE``.
        send: Rows to each rank.
    """

    token: Tensor
    indices: Tensor
    send: Tensor


class ExpertParallel(ParallelStyle):
    """Spread a stack of experts over a mesh axis and let tokens travel to them.

    The module's parameters must all be stacked, expert first, and its forward must be
    ``(x [T, D], indices [T, K], weights [T, K]) -> [T, D]``: the weighted sum of what the selected
    experts make of each token, where an index of -1 adds nothing. It runs unchanged, on the tokens
    that this rank received and with the experts that it holds.

    Comm (T local tokens, R of them times ranks that they go to, n ranks):
        forward: one all-to-all of n numbers, then of ``R * K`` indices, ``R * K`` weights and
        ``R * D`` elements of tokens, and back of ``R * D`` elements. backward: the same without
        numbers and indices.

    Close: one device sums over all experts of a token at once, here over those of each rank first.
    """

    def problems(self, module: nn.Module, degree: int) -> list[str]:
        """Return why ``module`` cannot be spread over ``degree`` ranks."""
        sizes = {name: p.shape[0] if p.dim() else 0 for name, p in module.named_parameters()}
        if len(set(sizes.values())) != 1:
            return [f"its parameters are no stack of equally many experts: {sizes}"]
        num_experts = next(iter(sizes.values()))
        if num_experts % degree:
            return [
                f"{num_experts} experts do not split evenly over axis 'ep' ({degree} ranks, "
                f"remainder {num_experts % degree})"
            ]
        return []

    def apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Keep this rank's experts of ``module``, wrap its forward, and return it.

        Args:
            module: A stack of experts.
            device_mesh: The 1-D mesh of the axis.

        Raises:
            LayoutError: It is no stack of experts, or these do not divide.
        """
        if problems := self.problems(module, device_mesh.size()):
            raise LayoutError.from_problems(f"cannot spread {type(module).__name__}", problems)
        forward: Any = ExpertForward(module, device_mesh)
        for name, parameter in list(module.named_parameters()):
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            owner.register_parameter(leaf, distribute(parameter, Shard(0), device_mesh))
        module.forward = forward
        return module

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.apply(module, device_mesh)


class ExpertForward:
    """Stands in for ``module.forward``: dispatch, the module's own forward, combine."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self._module = module
        self._call: Callable[..., Tensor] = module.forward
        self._group: dist.ProcessGroup = mesh.get_group()
        self._degree = mesh.size()
        self._num_local = next(module.parameters()).shape[0] // self._degree

    def __call__(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Compute this rank's tokens with everybody's experts.

        Shapes (local tokens in any number of dims, D width, K choices):
            x: ``[..., D]``. indices: ``[..., K]``, global numbers of experts. weights: the same.
            returns: ``[..., D]``.
        """
        tokens, indices, weights = (t.flatten(0, -2) for t in (x, indices, weights))
        return in_shape_of(x, self._sum(tokens, indices, weights))

    def _sum(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        route = plan_route(indices, num_local=self._num_local, degree=self._degree)
        send, receive = self._numbers(route.send)

        def dispatch(rows: Tensor) -> Tensor:
            return all_to_all_rows(rows, send=send, receive=receive, group=self._group)

        # Four bytes an index: eight would be a tenth of a narrow token.
        chosen = dispatch(route.indices.int()).long()
        arrived = dispatch(x.index_select(0, route.token))
        shares = dispatch(weights.index_select(0, route.token))
        with local_parameters(self._module):
            out = self._call(arrived, chosen, shares)
        rows = all_to_all_rows(out, send=receive, receive=send, group=self._group)
        total = weights.new_zeros(x.shape).index_add(0, route.token, rows.to(weights.dtype))
        return total.to(x.dtype)

    def _numbers(self, send: Tensor) -> tuple[list[int], list[int]]:
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self._group)
        both: list[list[int]] = torch.stack((send, receive)).tolist()
        return both[0], both[1]


def plan_route(indices: Tensor, *, num_local: int, degree: int) -> Route:
    """Return which rows go where: each token once to every rank that has an expert of its.

    Shapes (T tokens, K choices):
        indices: ``[T, K]``, global numbers of experts; -1 goes nowhere.
    """
    rank_of = indices // num_local  # -1 for a choice of -1
    goes = indices.new_zeros(indices.shape[0], degree + 1, dtype=torch.bool)
    goes.scatter_(1, rank_of + 1, True)
    rank, token = goes[:, 1:].t().nonzero(as_tuple=True)
    chosen = indices.index_select(0, token) - (rank * num_local).unsqueeze(1)
    is_there = (chosen >= 0) & (chosen < num_local)
    return Route(token, chosen.where(is_there, NOT_HERE), goes[:, 1:].sum(0))
