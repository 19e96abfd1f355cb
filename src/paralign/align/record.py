"""Record a training run, whoever wrote its loop, into a trace that ``compare`` can read.

    with pa.record("trace/par", model, mesh=mesh, optimizer=optimizer) as rec:
        loss = step(batch)
        rec.loss(loss, tokens=num_tokens, reduction="mean", scope="global")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)     # seen by itself
        optimizer.step()                                                   # ends the step

Gradients are taken as the optimizer is about to use them and before clipping. Recording reads and
never
writes: the run's numbers stay the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from paralign.align.activation_log import ACTIVATIONS
from paralign.align.held import HeldParameters
from paralign.align.name_rules import NameRule
from paralign.align.output_rules import OutputRule
from paralign.align.recorder import Recorder
from paralign.align.shard_rules import LayoutRule, ShardRule
from paralign.errors import ConfigError

WHAT = ("loss", "norm", "params", "grads", "optimizer", "microbatch_grads", *ACTIVATIONS)


def record(
    directory: str | Path,
    model: nn.Module | Sequence[nn.Module],
    *,
    mesh: Any = None,
    optimizer: Any = None,
    steps: int = 1,
    start: int = 0,
    what: Iterable[str] = ("loss", "norm", "params", "grads"),
    modules: str = "*",
    names: NameRule = None,
    shards: ShardRule | None = None,
    layouts: LayoutRule | None = None,
    outputs: OutputRule | None = None,
    output_grads: OutputRule | None = None,
    source: str = "auto",
    buffers: str | None = None,
    stages: Sequence[int] | None = None,
    facts: Mapping[str, Any] | None = None,
    alone: bool = False,
) -> Recorder:
    """Prepare to record a run; begin with ``with`` or :meth:`Recorder.start`.

    Args:
        directory: Folder of the trace, the same on every rank (or one per machine, brought together
            later). An earlier trace in it is replaced.
        model: The model, or the stage modules this rank holds, with global parameter names.
            Wrappers are looked through.
        mesh: The run's ``DeviceMesh``, or axis name -> process group or ``(index, size)`` of this
            rank, for all axes: ``{"pp": (0, 2), "dp": (1, 2), "tp": (3, 4)}``. Tells which axes
            hold replicas; what DTensors are split over is read from themselves. Megatron's groups
            are found without it.
        optimizer: The optimizer, or all of them; anything with ``step()``. Default: every torch
            optimizer that holds one of the parameters.
        steps: Number of optimizer steps to record; then the recorder detaches by itself.
        start: Number of optimizer steps to let pass first.
        what: Any of loss, norm, params, grads, optimizer; and, to find the module where two runs
            part, inputs, outputs (of modules) and output_grads; and microbatch_grads, what each
            micro-batch adds to the gradients before they are reduced.
        modules: Glob of the modules whose outputs are recorded.
        names: Renames parameters: old name -> new name, or a function. ``*`` in an old name stands
            for any text, and in the new one for what it matched. ``pa.Fused`` instead of a new name
            takes a fused parameter apart.
        shards: What plain tensors are cut over: name or pattern -> axis -> ``Shard(dim)`` or the
            dim. ``{"*.wq.weight": {"tp": 0}}``. DTensors, FSDP and Megatron say it themselves.
        layouts: The same in full: name or pattern -> ``{"shape": ..., "map": ...}`` as
            docs/trace.md describes them, or a function of the local tensor that returns it.
        outputs: What a rank's plain module outputs are of those of a micro-batch, where tensor
            parallelism cuts them: name or pattern of modules -> axis -> ``Shard(dim)``,
            ``Replicate()`` or ``Partial()``; equal parts. ``{"*.wq": {"tp": Shard(-1)}}``; of what
            returns several tensors ``"*.router[0]"`` or ``"*.router[*]"``. What nothing is said of
            is placed by its size, and then listed without gate.
        output_grads: The same of their gradients, where these are something else than the outputs:
            ``Partial()`` where each rank has the gradient of its own use of a replicated output.
        source: Where parameters and gradients are kept: ``torch``, ``megatron`` (attributes of its
            parameters, ``main_grad``), ``deepspeed`` (its functions); ``auto`` asks each parameter.
        buffers: Pattern of the names of buffers to record like frozen parameters, such as
            ``"*expert_bias"``: state that training moves without a gradient. None: no buffer.
        stages: Pipeline stages this rank holds, for the trace to say.
        facts: What is true of the run and can be written as JSON: ``global_batch``, ``seq_len``,
            ``num_microbatches``, ``compute_dtype``, ``clip``, ``seed``, ... compared before any
            number.
        alone: This process records a run of its own although it belongs to a process group.

    Raises:
        ConfigError: An argument is not what is described here; all problems are listed.
    """
    chosen = tuple(what)
    _check_arguments(steps, start, chosen)
    in_group = dist.is_available() and dist.is_initialized() and not alone
    world_size = dist.get_world_size() if in_group else 1
    if "microbatch_grads" in chosen and mesh is None and world_size > 1:
        raise ConfigError(
            f"what='microbatch_grads' needs mesh= in a run of {world_size} ranks: over which axes "
            "they are to be summed is not known without it."
        )
    stage_modules = [model] if isinstance(model, nn.Module) else list(model)
    held = HeldParameters.of(
        stage_modules,
        mesh=mesh,
        names=names,
        shards=shards,
        layouts=layouts,
        source=source,
        buffers=buffers,
        world_size=world_size,
    )
    return Recorder(
        directory,
        stage_modules,
        held=held,
        optimizer=optimizer,
        steps=steps,
        start=start,
        what=chosen,
        stages=stages,
        facts=dict(facts or {}),
        alone=alone,
        modules_pattern=modules,
        outputs=outputs,
        output_grads=output_grads,
    )


def _check_arguments(steps: int, start: int, what: tuple[str, ...]) -> None:
    problems = []
    if steps < 1:
        problems.append(f"steps={steps} must be at least 1")
    if start < 0:
        problems.append(f"start={start} must be at least 0")
    problems += [
        f"what={name!r} is not one of {', '.join(WHAT)}" for name in what if name not in WHAT
    ]
    if not what:
        problems.append("what is empty, so there is nothing to record")
    if problems:
        raise ConfigError.from_problems("cannot record", problems)
