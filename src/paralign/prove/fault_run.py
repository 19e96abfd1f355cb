"""What a fault is given on every rank: the parallelised run, and ways to reach into its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paralign.config.run import RunConfig
from paralign.prove.hooks import Hooks

_MISSING = object()


class FaultRun:
    """One rank's run, after ``parallelize`` and before its first step.

    Attributes:
        config: The run.
        mesh: Its mesh.
        program: What :func:`paralign.parallelize` returned; for a config with ``program``, what the
            user's ``build`` returned.
        modules: This rank's modules, with global parameter names.
        parameters: This rank's parameters by global name, as the optimizer gets them.

    Args:
        config: The run.
        mesh: Its mesh.
        build: Builds the program; called once here, and again by :meth:`rebuild`.
        parts: Program -> its modules and its parameters by global name.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: DeviceMesh,
        *,
        build: Callable[[], Any],
        parts: Callable[[Any], tuple[list[nn.Module], dict[str, nn.Parameter]]],
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.hooks = Hooks()
        self._build = build
        self._parts = parts
        self._undo: list[Callable[[], None]] = []
        self.rebuild()

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place on every mesh axis, by name."""
        names = self.mesh.mesh_dim_names or ()
        return dict(zip(names, self.mesh.get_coordinate() or (), strict=True))

    def rebuild(self) -> None:
        """Build the program again, with what has been patched so far in place.

        For faults in how a run is put together; ``program``, ``modules`` and ``parameters`` are the
        new ones afterwards. Collective: call it on every rank or on none.
        """
        self.program = self._build()
        self.modules, self.parameters = self._parts(self.program)

    def patch(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute of a module, class or object until this fault is over.

        Returns:
            What it was.

        Raises:
            AttributeError: There is no such attribute, so the fault would change nothing.
        """
        old = getattr(owner, name)
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        setattr(owner, name, value)

        def undo() -> None:
            if own is not _MISSING:
                setattr(owner, name, own)
            elif _is_registered(owner, name):
                setattr(owner, name, old)
            else:
                delattr(owner, name)

        self._undo.append(undo)
        return old

    def on_batch(self, change: Callable[[Any], Any]) -> None:
        """Call ``change(batch)`` with this rank's share of every batch before the step sees it.

        It may change the batch in place, or return another. A user's program gets the global batch.
        """
        self.hooks.on_batch.append(change)

    def after_backward(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when gradients are final and neither recorded nor clipped."""
        self.hooks.after_backward.append(call)

    def before_step(self, call: Callable[[torch.optim.Optimizer], object]) -> None:
        """Call ``call(optimizer)`` between clipping and ``optimizer.step()``."""
        self.hooks.before_step.append(call)

    def after_step(self, call: Callable[[torch.optim.Optimizer], object]) -> None:
        """Call ``call(optimizer)`` between ``optimizer.step()`` and the next forward."""
        self.hooks.after_step.append(call)

    def undo(self) -> None:
        """Take back every patch, the last one first."""
        while self._undo:
            self._undo.pop()()


def _is_registered(owner: Any, name: str) -> bool:
    """Whether a module keeps ``name`` as a parameter, buffer or child, not as an attribute."""
    return isinstance(owner, nn.Module) and any(
        name in registry for registry in (owner._parameters, owner._buffers, owner._modules)
    )
