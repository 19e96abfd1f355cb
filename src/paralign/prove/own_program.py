"""A user's own parallel code under ``align``, ``drill`` and ``sweep``: ``program`` in RUN.yaml.

    def build(model, mesh, config):           # on every rank; the model is whole, on the CPU
        parallel = ...                        # whatever you do to it
        def step(batch): ...                  # tokens and labels [B, S] of the whole global batch
        return step

``step`` runs forward and backward of its rank's share, so that gradients are final when it returns,
and may clip and step its optimizer as well. See ``docs/program.md`` for the attributes that a step
may carry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paralign.align import record
from paralign.config.run import RunConfig
from paralign.data.source import TokenSource
from paralign.dropout import named_dropouts
from paralign.errors import ConfigError
from paralign.launch import report_event
from paralign.mesh import build_mesh
from paralign.models.own import load_symbol
from paralign.prove.hooks import Hooks
from paralign.prove.steps import RECORDED, run_facts
from paralign.train.build import (
    Numerics,
    build_data,
    build_pieces,
    init_rule,
    initialise_whole,
)
from paralign.train.optimizer import build_optimizer
from paralign.train.start import start_whole

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class OwnProgram:
    """What a user's ``build`` returned on this rank.

    Attributes:
        step: Global batch -> loss.
        modules: Modules with the parameters that are trained.
        clip: Largest norm -> norm, for a step that leaves clipping and optimizer to paralign.
        optimizers: The optimizers that the user's step steps; empty: paralign clips and steps.
        names: Renames parameters for the trace: a mapping or a function.
        outputs: What plain module outputs are of those of a micro-batch, or None.
        output_grads: The same of their gradients, or None.
        reference: ``pkg.module:build``, for messages.
    """

    step: Callable[[Batch], Any]
    modules: Sequence[nn.Module]
    clip: Callable[[float], Any] | None
    optimizers: Sequence[Any]
    names: Any
    outputs: Any
    output_grads: Any
    reference: str

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name, each once."""
        return {
            name: parameter
            for module in self.modules
            for name, parameter in module.named_parameters()
        }


def build_own_program(
    config: RunConfig, precision: Numerics, *, mesh: DeviceMesh | None = None
) -> tuple[OwnProgram, DeviceMesh]:
    """Call the user's ``build`` with a model that starts as the reference's does.

    Raises:
        ConfigError: The function cannot be called or returns something else. What it raises itself
            passes through.
    """
    reference = str(config.program)
    if mesh is None:
        mesh = build_mesh(config.mesh.degrees, config.device)
    build = load_symbol(reference, key="program")
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    start_whole(model, config)
    seen = config.model_copy(
        update={"align": config.align.model_copy(update={"dtype": precision.name})}
    )
    step = build(model, mesh, seen)
    if not callable(step):
        raise ConfigError(
            f"program={reference!r} returned an object of type {type(step).__name__}, which cannot "
            "be called. Return step: a function of the global batch that returns the loss."
        )
    modules = getattr(step, "modules", model)
    program = OwnProgram(
        step=step,
        modules=[modules] if isinstance(modules, nn.Module) else list(modules),
        clip=getattr(step, "clip", None),
        optimizers=_as_list(getattr(step, "optimizer", None)),
        names=getattr(step, "names", None),
        outputs=getattr(step, "outputs", None),
        output_grads=getattr(step, "output_grads", None),
        reference=reference,
    )
    if wrong := [m for m in program.modules if not isinstance(m, nn.Module)]:
        raise ConfigError(
            f"program={reference!r}: step.modules holds an object of type "
            f"{type(wrong[0]).__name__}. List the modules whose parameters this rank trains."
        )
    return program, mesh


def run_own_program(config: RunConfig, precision: Numerics, trace: Path) -> None:
    """Train ``config.align.steps`` steps with the user's own code and record them."""
    program, mesh = build_own_program(config, precision)
    record_own_program(config, precision, program, mesh, trace)


def record_own_program(
    config: RunConfig,
    precision: Numerics,
    program: OwnProgram,
    mesh: DeviceMesh,
    trace: Path,
    hooks: Hooks | None = None,
    data: TokenSource | None = None,
) -> None:
    """Train and record a program that has been built.

    Raises:
        ConfigError: A step returns something that is no loss, or leaves paralign a clipping that it
            cannot do.
    """
    loop = _Loop(config, program, mesh, hooks or Hooks())
    data = build_data(config) if data is None else data
    # Nobody else's code need know of it.
    unseen = () if named_dropouts(program.modules) else ("samples",)
    with record(
        trace,
        program.modules,
        mesh=mesh,
        optimizer=loop.watched,
        steps=config.align.steps,
        what=RECORDED,
        names=program.names,
        outputs=program.outputs,
        output_grads=program.output_grads,
        facts=run_facts(config, precision),
    ) as recorder:
        for number in range(config.align.steps):
            batch = data.global_batch(number)
            seen = {name: tensor for name, tensor in batch.items() if name not in unseen}
            loop.run(seen, recorder)
            if dist.get_rank() == 0:
                report_event(f"{program.reference}: step {number + 1} of {config.align.steps}")


class _Loop:
    """Runs steps, and does of each what the user's own step leaves open."""

    def __init__(
        self, config: RunConfig, program: OwnProgram, mesh: DeviceMesh, hooks: Hooks
    ) -> None:
        self._config = config
        self._program = program
        self._mesh = mesh
        self._hooks = hooks
        self._ours: torch.optim.Optimizer | None = None
        if not program.optimizers:
            self._ours = build_optimizer(config.optimizer, program.parameters.items())
        # The user's step returns the loss after his optimizer has moved the parameters, so what
        # ends a recorded step is this, not the optimizer.
        self._end = _EndOfStep()

    @property
    def watched(self) -> list[Any]:
        """What the recorder is to watch; its step ends when all of them have stepped."""
        return [self._ours] if self._ours is not None else [*self._program.optimizers, self._end]

    def run(self, batch: Batch, recorder: Any) -> None:
        """Run one step and record it."""
        with _watched_steps(self._hooks if self._ours is None else None) as stepped:
            returned = self._program.step(self._hooks.change_batch(batch))
        self._check_stepped(stepped)
        loss = _loss_of(self._program.reference, returned)
        if loss is not None:
            recorder.loss(**loss)
        if self._ours is None:
            self._end.step()
            self._hooks.step_done(self._program.optimizers[0])
            return
        self._hooks.backward_done()
        recorder.gradients()
        if self._config.optimizer.clip is not None:
            recorder.norm(_clip(self._config, self._program, self._config.optimizer.clip))
        self._hooks.step_begins(self._ours)
        self._ours.step()
        self._ours.zero_grad()
        self._hooks.step_done(self._ours)

    def _check_stepped(self, stepped: list[Any]) -> None:
        name = self._program.reference
        if self._ours is not None and stepped:
            raise ConfigError(
                f"program={name!r}: step moved the parameters with a {type(stepped[0]).__name__} "
                "that it does not show. Set step.optimizer to it (or to a list), or leave clipping "
                "and optimizer to paralign."
            )
        shown = [o for o in self._program.optimizers if isinstance(o, torch.optim.Optimizer)]
        if self._ours is None and (idle := [o for o in shown if not _among(o, stepped)]):
            raise ConfigError(
                f"program={name!r}: step.optimizer is a {type(idle[0]).__name__} that step did not "
                "step. Call its step() once in every step, or leave step.optimizer out: then "
                "paralign clips and steps one made from the config."
            )


class _EndOfStep:
    """Stands beside the user's optimizers; its step ends what is recorded of a step."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []

    def step(self) -> None:
        """Do nothing: it is watched."""


@contextmanager
def _watched_steps(hooks: Hooks | None) -> Iterator[list[Any]]:
    """Collect the optimizers that step meanwhile, and call ``hooks`` before they do."""
    stepped: list[Any] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if hooks is not None:
            hooks.backward_done()
            hooks.step_begins(optimizer)

    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(lambda o, args, kwargs: stepped.append(o)),
    ]
    try:
        yield stepped
    finally:
        for handle in handles:
            handle.remove()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _among(item: Any, items: Sequence[Any]) -> bool:
    return any(item is other for other in items)


def _loss_of(reference: str, loss: Any) -> dict[str, Any] | None:
    """Turn what a step returned into the arguments of ``rec.loss``; None: this rank has no loss."""
    if loss is None:
        return None
    if isinstance(loss, tuple) and len(loss) == 2 and all(map(_is_number, loss)):
        return {"value": loss[0], "tokens": loss[1], "reduction": "sum", "scope": "local"}
    if _is_number(loss):
        return {"value": loss, "reduction": "mean", "scope": "global"}
    raise ConfigError(
        f"program={reference!r}: step returned {_describe(loss)}. Return the mean loss over "
        "the valid tokens of the global batch, or (sum over this rank's tokens, their number), or "
        "None on ranks that have no loss."
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"an object of type {type(value).__name__}"


def _clip(config: RunConfig, program: OwnProgram, largest: float) -> Any:
    if program.clip is not None:
        return program.clip(largest)
    parameters = list(program.parameters.values())
    sharded = all(hasattr(parameter, "placements") for parameter in parameters)
    if config.mesh.pp > 1 or not (sharded or config.mesh.degrees.tp == 1):
        raise ConfigError(
            f"program={program.reference!r} leaves clipping to paralign, which cannot see how its "
            f"parameters are spread over {config.mesh.degrees}. Give step.clip, a function "
            "max_norm -> norm; or clip and step inside step; or use optimizer.clip: null."
        )
    return torch.nn.utils.clip_grad_norm_(parameters, largest)
