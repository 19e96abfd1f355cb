"""Router biases: moved once per optimizer step, and never forgotten."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.errors import AlignError
from paralign.mesh import Axis, fold
from paralign.models.router import Router, update_biases


class RouterUpdates:
    """Moves the biases of this rank's routers, and sees when a step has left them behind.

    Args:
        routers: This rank's routers by global name; none is fine.
        parameters: What an optimizer moves on this rank.
        mesh: The run's mesh.
        model_has_biases: Whether any rank has a router with a bias.
    """

    def __init__(
        self,
        routers: Mapping[str, Router],
        parameters: Collection[nn.Parameter],
        mesh: DeviceMesh,
        *,
        model_has_biases: bool,
    ) -> None:
        self._routers = dict(routers)
        self._parameters = [p for p in parameters if p.requires_grad]
        self._group = fold(mesh, Axis.ROUTED).get_group()
        self._model_has_biases = model_has_biases
        self._moves_seen: int | None = None  # at a step that the biases have not followed

    def update(self) -> None:
        """Move every bias by what all steps since the last call have counted.

        Comm:
            One all-reduce of a whole number per expert and layer of this rank, over ``routed``.
        """

        def sum_over_tokens(counts: Tensor) -> Tensor:
            dist.all_reduce(counts, group=self._group)
            return counts

        update_biases(self._routers.values(), sum_over_tokens=sum_over_tokens)
        self._moves_seen = None

    def forget(self) -> None:
        """Forget what has been counted since the last update."""
        for router in self._routers.values():
            router.tally.take_counts()
        self._moves_seen = None

    def note_step(self) -> None:
        """Say that gradients were computed, so that an update is due."""
        if self._model_has_biases:
            self._moves_seen = self._num_moves()

    def check(self) -> None:
        """Raise where an optimizer has stepped after a step that no update followed.

        On every rank alike, also where no router is, so that none waits for the others.

        Raises:
            AlignError: The parameters have moved and the biases have not.
        """
        if self._moves_seen not in (None, self._num_moves()):
            raise AlignError(
                "the parameters have moved since the last step, but the router biases have not: "
                "experts would never be balanced. Call program.update_routers() between "
                "program.step and optimizer.step()."
            )

    def _num_moves(self) -> int:
        """Return a number that grows whenever an optimizer moves a parameter in place."""
        return sum(parameter._version for parameter in self._parameters)
