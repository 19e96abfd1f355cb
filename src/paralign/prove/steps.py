"""The recorded training loop that both runs share: same data, optimizer and order of calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paralign.align import record
from paralign.align.output_rules import OutputRule
from paralign.config.run import RunConfig
from paralign.data.source import TokenSource
from paralign.launch import report_event
from paralign.train.build import Numerics, build_data
from paralign.train.local_shards import on_local_shards
from paralign.train.optimizer import build_optimizer

RECORDED = ("loss", "norm", "params", "grads", "optimizer", "inputs")
ROUTER_BIASES = "*router.bias"
ACTIVATIONS = ("outputs", "output_grads", "microbatch_grads")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the loop needs of a run.

    Attributes:
        modules: Modules with global parameter names.
        parameters: What the optimizer moves, by global name.
        step: Global batch -> loss and number of valid tokens; adds gradients to ``.grad``.
        clip: Largest norm -> norm before clipping; scales the gradients.
        num_microbatches: Pieces a rank's rows go through in.
        mesh: The mesh, where there is one.
        names: Name of a tied copy -> its canonical name.
        outputs: Module -> axis -> which part of its output this rank returns.
        output_grads: The same of the output's gradient.
        alone: This process runs by itself although it belongs to a process group.
        speaks: Whether this process reports progress.
        before_step: Called with the optimizer between clipping and its step.
        after_step: Called with the optimizer between its step and the next forward.
        data: Where global batches come from; None: it is made from the config, which takes longer
            than a step.
        contributions: Record what every micro-batch adds to each gradient, before any reduction.
        forward_modules: What computes, where that is not ``modules`` (a copy in another dtype).
        inputs_of: Global batch -> per micro-batch the tokens, labels, positions and numbers of the
            samples that go through here, in order;
            None: the modules are given all of them.
        update_routers: Called once per optimizer step, before it, to balance experts.
    """

    modules: Sequence[nn.Module]
    parameters: Mapping[str, nn.Parameter]
    step: Callable[[Mapping[str, Tensor]], tuple[Tensor, int]]
    clip: Callable[[float], Tensor]
    num_microbatches: int = 1
    mesh: Any = None
    names: Mapping[str, str] = field(default_factory=dict)
    outputs: OutputRule = field(default_factory=dict)
    output_grads: OutputRule = field(default_factory=dict)
    alone: bool = False
    speaks: bool = True
    before_step: Callable[[torch.optim.Optimizer], None] | None = None
    after_step: Callable[[torch.optim.Optimizer], None] | None = None
    contributions: bool = False
    data: TokenSource | None = None
    forward_modules: Sequence[nn.Module] | None = None
    inputs_of: Callable[[Mapping[str, Tensor]], Iterable[Mapping[str, Tensor]]] | None = None
    update_routers: Callable[[], None] | None = None


def record_steps(
    config: RunConfig,
    precision: Numerics,
    run: Run,
    trace: Path,
    label: str,
) -> None:
    """Train ``config.align.steps`` steps and record them into ``trace``."""
    what = RECORDED + (ACTIVATIONS if config.align.record == "activations" else ())
    computes_itself = run.forward_modules is None or all(
        any(one is other for other in run.modules) for one in run.forward_modules
    )
    if not computes_itself:
        # Gradients arrive at the parameters of the copy, which are not the recorded ones.
        what = tuple(name for name in what if name != "microbatch_grads")
    if run.contributions and "microbatch_grads" not in what:
        what += ("microbatch_grads",)
    data = build_data(config) if run.data is None else run.data
    optimizer = build_optimizer(config.optimizer, run.parameters.items())
    clip = float("inf") if config.optimizer.clip is None else config.optimizer.clip
    with record(
        trace,
        run.modules,
        mesh=run.mesh,
        optimizer=optimizer,
        steps=config.align.steps,
        what=what,
        names=dict(run.names),
        outputs=run.outputs,
        output_grads=run.output_grads,
        buffers=ROUTER_BIASES,
        facts={**run_facts(config, precision), "num_microbatches": run.num_microbatches},
        alone=run.alone,
    ) as recorder:
        if run.forward_modules is not None:
            recorder.watch_modules(run.forward_modules)
        for number in range(config.align.steps):
            batch = data.global_batch(number)
            if run.inputs_of is not None:
                for fed in run.inputs_of(batch):
                    recorder.inputs(**fed)
            loss, num_tokens = run.step(batch)
            recorder.loss(loss, tokens=num_tokens, reduction="mean", scope="global")
            recorder.gradients()
            recorder.norm(run.clip(clip))
            _before_step(run, optimizer)
            with on_local_shards():
                optimizer.step()
            optimizer.zero_grad()
            if run.after_step is not None:
                run.after_step(optimizer)
            if run.speaks:
                report_event(f"{label}: step {number + 1} of {config.align.steps}")


def _before_step(run: Run, optimizer: torch.optim.Optimizer) -> None:
    # Before the optimizer, whose end ends the recorded step.
    if run.update_routers is not None:
        run.update_routers()
    if run.before_step is not None:
        run.before_step(optimizer)


def run_facts(config: RunConfig, precision: Numerics) -> dict[str, Any]:
    """Return what must be the same in both runs."""
    return {
        "compute_dtype": _name(precision.compute),
        "master_dtype": _name(precision.master),
        "reduce_dtype": _name(precision.reduce),
        "global_batch": config.batch.global_batch,
        "seq_len": config.batch.seq_len,
        "optimizer": config.optimizer.model_dump(mode="json"),
        "clip": config.optimizer.clip,
        "seed": config.align.seed,
        "data": config.data.model_dump(mode="json"),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
