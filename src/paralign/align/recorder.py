"""The state of one recording: which step it is, whether its gradients were taken, where they go.

A step begins with ``start`` or with the end of the step before. Its gradients are taken once, at
the first of: ``gradients()``, a clipping call, the entry of ``optimizer.step()``. It ends when
every optimizer has stepped; the parameters and the optimizer's state are taken then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.align.activation_log import ActivationLog
from paralign.align.agreement import begin_folder, check_disk, say_bytes
from paralign.align.forward_count import ForwardCount
from paralign.align.held import HeldParameters
from paralign.align.micro_gradients import MicroGradients
from paralign.align.names import describe_owners
from paralign.align.output_rules import OutputRule, OutputRules
from paralign.align.states import describe_optimizer
from paralign.align.step_gradients import StepGradients
from paralign.align.step_scalars import StepScalars, check_loss
from paralign.align.trace import Facts, Kind, RankIndex
from paralign.align.trace_writer import TraceWriter, dtype_name
from paralign.align.watch import StepWatch
from paralign.errors import TraceError
from paralign.vector_math import settle_vector_math


class Recorder:
    """Records one run; made by :func:`paralign.align.record.record`, which explains the arguments.

    Comm:
        ``start`` broadcasts one number over the default process group, so every rank must record.
        Nothing else communicates, but for a DTensor given as loss or norm.
    """

    def __init__(
        self,
        directory: str | Path,
        modules: Sequence[nn.Module],
        *,
        held: HeldParameters,
        optimizer: Any,
        steps: int,
        start: int,
        what: tuple[str, ...],
        stages: Sequence[int] | None,
        facts: dict[str, Any],
        alone: bool,
        modules_pattern: str = "*",
        outputs: OutputRule | None = None,
        output_grads: OutputRule | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._what = what
        self._first, self._stop_at = start, start + steps
        self._facts = facts
        in_group = dist.is_available() and dist.is_initialized() and not alone
        self._rank = dist.get_rank() if in_group else 0
        self._world_size = dist.get_world_size() if in_group else 1
        self._held = held
        self._pieces = held.pieces
        self._parameters = held.pieces.parameters
        self._axes = held.axes
        self._stages = None if stages is None else list(stages)
        if optimizer is None or isinstance(optimizer, list | tuple):
            self._optimizers = optimizer
        else:
            self._optimizers = [optimizer]
        self._watch = StepWatch(
            [named.parameter for named in self._parameters],
            self._optimizers,
            on_gradients=self._gradients_in_use,
            on_norm=self._norm_in_use,
            on_step_begin=self._step_begins,
            on_step_end=self._step_ends,
        )
        self._rules = OutputRules(self._axes, outputs or {}, output_grads or {})
        self._activations = ActivationLog(
            modules,
            self._parameters,
            what=what,
            pattern=modules_pattern,
            axes=self._axes,
            rules=self._rules,
            step=lambda: self._step if self._recording() else None,
        )
        self._forwards = ForwardCount(modules)
        self._micro = MicroGradients(self._parameters, self._micro_batch_ends, modules=modules)
        self._writer: TraceWriter | None = None
        self._finished = False
        self._step = 0
        self._gradients = StepGradients(
            self._pieces,
            self._forwards,
            step=lambda: self._step,
            writer=self._open_writer,
            optimizers=lambda: (
                self._stepped if self._optimizers is None else list(self._optimizers)
            ),
        )
        self._scalars = StepScalars(self._axes, step=lambda: self._step, writer=self._open_writer)
        self._stepped: list[Any] = []
        """Optimizers that have stepped in the step in progress."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that this rank will need at most on disk for parameters and gradients.

        What optimizers and modules hold is not known before the run.
        """
        steps = self._stop_at - self._first
        # Gradients before clipping and after it.
        kinds = ("params" in self._what) * (steps + 1) + ("grads" in self._what) * 2 * steps
        return self._pieces.local_bytes * kinds

    def start(self) -> Recorder:
        """Prepare the folder, take the initial parameters and begin to watch.

        Raises:
            TraceError: The folder holds something else than a trace, the disk has not enough room,
                or recording has begun before.
            ConfigError: What was said of mesh, names or shards does not fit the ranks.
        """
        if self._writer is not None:
            raise TraceError(f"{self.directory}: this recorder was started before; make a new one.")
        trace_id = begin_folder(self.directory, self._rank, self._world_size)
        need = check_disk(self.directory, self.disk_bytes, self._world_size)
        if self._rank == 0:
            logging.getLogger("paralign").info(
                "recording into %s needs %s on this machine, and more for optimizer states and "
                "activations",
                self.directory,
                say_bytes(need),
            )
        patterns = {*self._rules.outputs, *self._rules.grads}
        used = self._activations.used_rules() if patterns else set()
        self._held.agree(self._world_size, self._rank, outputs=patterns, outputs_used=used)
        self._rules.check()
        index = RankIndex(self._rank, self._world_size, trace_id)
        index.stages = self._stages
        index.run = dict(self._facts)
        index.modules = describe_owners(self._parameters)
        self._writer = TraceWriter(self.directory, index)
        settle_vector_math()
        self._watch.start()
        self._activations.start(self._writer)
        self._forwards.start()
        if "microbatch_grads" in self._what:
            self._micro.start()
        self._step_is_next()
        return self

    def inputs(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        samples: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Say what the next micro-batch is fed, before its forward; or all of them, in order.

        Needed only where the model is not given whole numbers ``[rows, positions]``, or not all of
        these: what it is given is seen by itself.

        Args:
            tokens: This rank's rows and positions.
            labels: Labels of the same tokens.
            positions: Their positions, ``[rows, positions]`` or ``[positions]``.
            samples: Number of every row's sample in the global batch.

        Raises:
            ConfigError: Shapes do not agree, or these are no whole numbers.
        """
        self._activations.inputs(tokens, labels, positions, samples)

    def watch_modules(self, modules: Sequence[nn.Module]) -> None:
        """Take outputs and inputs from other modules than those that hold the parameters.

        For loops that compute with a copy, in another dtype; its modules have the same names.
        """
        self._activations.watch_modules(modules)

    def loss(
        self,
        value: float | Tensor,
        *,
        tokens: int | Tensor | None = None,
        reduction: str = "sum",
        scope: str = "local",
    ) -> None:
        """Report a loss of the step in progress, before ``optimizer.step()`` ends it.

        Args:
            value: The loss.
            tokens: Number of valid label tokens it was computed from.
            reduction: ``sum`` or ``mean`` over these tokens.
            scope: ``local``: a part (this rank's, or one micro-batch's); the parts of all ranks and
                calls are added up. ``global``: the loss of the whole step.

        Raises:
            ConfigError: A local mean without its tokens, or an unknown reduction or scope.
        """
        check_loss(tokens, reduction, scope)
        if self._recording() and "loss" in self._what:
            self._scalars.loss(value, tokens, reduction, scope)

    def norm(self, value: float | Tensor) -> None:
        """Report the gradient norm of the step in progress.

        torch's clipping is seen without it. What is reported here counts instead of what was seen:
        a stage's own norm, say, before it was summed over the pipeline.
        """
        if self._recording() and "norm" in self._what:
            self._scalars.norm(value)

    def gradients(self) -> None:
        """Take the gradients now; needed only where clipping hides inside another call."""
        self._gradients_in_use(None)

    def _gradients_in_use(self, concerned: set[int] | None, *, at_step: bool = False) -> None:
        """Take the gradients before anything uses them, the first time in a step."""
        stepped = {
            id(parameter)
            for optimizer in self._stepped
            for group in getattr(optimizer, "param_groups", [])
            for parameter in group["params"]
        }
        if self._stepped and (concerned is None or concerned & stepped):
            # Gradients of what has been stepped already: the step before had ended, though some
            # trainable parameters belong to no optimizer. Nothing has changed the parameters since.
            self._end_step()
        if self._recording() and "grads" in self._what:
            self._gradients.take(at_step=at_step)

    def _micro_batch_ends(self, micro_batch: int, gradients: dict[int, Tensor]) -> None:
        """Write what a backward pass has added, if it belongs to a recorded step."""
        if self._stepped:
            self._end_step()
        if self._recording():
            self._gradients.take_micro_batch(micro_batch, gradients)

    def _norm_in_use(self, value: Any) -> None:
        if self._recording() and "norm" in self._what:
            self._scalars.norm_in_use(value)

    def stop(self) -> None:
        """Detach and complete the trace. A second call does nothing.

        Raises:
            TraceError: Recording has not begun.
        """
        writer = self._open_writer()
        if self._finished:
            return
        if self._stepped:
            self._end_step()
        if not self._finished:
            self._finish(writer)

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            # Without its index the trace counts as truncated, which it is.
            self._watch.stop()
            self._activations.abandon()
            self._micro.stop()
            self._forwards.stop()
            self._finished = True

    def _recording(self) -> bool:
        return (
            self._writer is not None
            and not self._finished
            and self._first <= self._step < self._stop_at
        )

    def _open_writer(self) -> TraceWriter:
        if self._writer is None:
            raise TraceError(
                f"{self.directory}: recording has not begun. Use 'with pa.record(...) as rec:' or "
                "rec.start()."
            )
        return self._writer

    def _step_begins(self, optimizer: Any) -> None:
        if any(optimizer is stepped for stepped in self._stepped):
            self._end_step()
        self._gradients_in_use(set(), at_step=True)
        if self._recording():
            self._gradients.take_clipped()

    def _step_ends(self, optimizer: Any) -> None:
        self._stepped.append(optimizer)
        if self._optimizers is not None:
            complete = all(any(o is s for s in self._stepped) for o in self._optimizers)
        else:
            stepped = {
                id(parameter)
                for known in self._stepped
                for group in getattr(known, "param_groups", [])
                for parameter in group["params"]
            }
            complete = all(
                id(named.parameter) in stepped
                for named in self._parameters
                if named.parameter.requires_grad
            )
        if complete:
            self._end_step()

    def _end_step(self) -> None:
        writer = self._open_writer()
        if self._recording():
            self._activations.end_step()
            if "grads" in self._what:
                self._gradients.take_last()
            self._gradients.take_clipped()
            writer.index.steps.append(self._step)
            if not writer.index.optimizers:
                names: dict[int, list[str]] = {}
                for named in self._parameters:
                    names.setdefault(id(named.parameter), []).append(named.name)
                writer.index.optimizers = [describe_optimizer(o, names) for o in self._stepped]
            if "optimizer" in self._what:
                moments, unknown = self._pieces.moments(self._step, self._stepped)
                writer.index.not_recorded += unknown
                writer.write(f"step{self._step}.moment", moments)
            if "microbatch_grads" in self._what:
                self._note_silent(writer)
            if "params" in self._what:
                self._write_parameters(Kind.PARAM_AFTER)
        self._step += 1
        self._gradients.end_step()
        self._scalars.end_step()
        self._stepped = []
        self._step_is_next()
        if self._step >= self._stop_at:
            self._finish(writer)

    def _step_is_next(self) -> None:
        if self._step == self._first and "params" in self._what:
            self._write_parameters(Kind.PARAM)

    def _write_parameters(self, kind: str) -> None:
        entries = self._pieces.values(kind, self._step)
        self._open_writer().write(f"step{self._step}.{kind}", entries)

    def _note_silent(self, writer: TraceWriter) -> None:
        """Say which parameters have a gradient that came from no micro-batch that was seen."""
        silent = self._micro.new_step()
        norms = self._pieces.norms()
        for number in silent:
            named = self._parameters[number]
            if norms[number] is not None and named.parameter.requires_grad:
                note = {
                    "name": f"{named.name} (microbatch_grads)",
                    "why": "no gradient was seen to arrive: its module was not called, or is "
                    "compiled, or adds to the gradient by itself",
                }
                writer.index.not_recorded.append(note)

    def _finish(self, writer: TraceWriter) -> None:
        self._finished = True
        self._watch.stop()
        self._activations.stop()
        self._micro.stop()
        self._forwards.stop()
        writer.index.coordinates = self._axes.coordinates
        writer.index.axes = self._axes.groups
        writer.finish(self._run_facts(writer.index) if self._rank == 0 else None)

    def _run_facts(self, index: RankIndex) -> Facts:
        dtypes: dict[str, int] = {}
        for named in self._parameters:
            name = dtype_name(named.parameter.dtype, named.name)
            dtypes[name] = dtypes.get(name, 0) + named.parameter.numel()
        run = {"compute_dtype": max(dtypes, key=lambda name: dtypes[name]), **self._facts}
        versions = {"torch": str(torch.__version__)}
        return Facts(index.trace_id, self._world_size, index.steps, list(self._what), versions, run)
