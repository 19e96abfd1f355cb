"""``paralign train`` on one rank: steps, metrics, checkpoints, and how a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paralign.config.run import RunConfig
from paralign.errors import ConfigError, TrainingError
from paralign.launch import report_event
from paralign.mesh import degrees_of
from paralign.program import Program
from paralign.train.build import build_data, build_program, training_numerics
from paralign.train.checkpoint import Checkpoint, Checkpoints, find_checkpoints
from paralign.train.checkpoint_load import load
from paralign.train.data import open_held_out
from paralign.train.garbage import garbage_by_hand
from paralign.train.journal import Journal
from paralign.train.local_shards import on_local_shards
from paralign.train.meter import Meter
from paralign.train.metrics import Metrics, Validation
from paralign.train.optimizer import build_optimizer
from paralign.train.profiling import traced_steps
from paralign.train.replicas import ReplicaCheck
from paralign.train.schedule import Schedule
from paralign.train.seed import check_holds_all
from paralign.train.start import start_program
from paralign.train.state import (
    non_finite,
    num_optimizer_steps,
    set_optimizer_steps,
    tensors_of,
    tensors_of_copies,
)
from paralign.train.stop import StopRequest, stop_on_signals
from paralign.train.validate import validate

# Sections of which every key decides what is trained; the others say only how.
_SAME = ("model", "batch", "data", "optimizer", "schedule")
_SAME_TRAIN = ("seed", "accumulate")
_WHERE = {("data", "token_dir")}  # does not decide what is read there

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        step: Optimizer steps made in all.
        is_complete: All of them; otherwise the run was asked to stop.
        loss: Of the last step; None if there was none.
    """

    step: int
    is_complete: bool
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step says of itself; see :class:`paralign.train.metrics.Metrics`."""

    loss: float
    loss_parts: dict[str, float]
    norm: float
    lr: float


def run_training(config: RunConfig, say: Say) -> Ended:
    """Train on this rank, from the last complete checkpoint in ``config.train.dir`` if any.

    Args:
        config: The run; see ``docs/train.md``.
        say: Told what goes on, on the first rank.

    Comm:
        Besides what :meth:`paralign.program.Program.step` does, two all-reduces of one number a
        step, and what :meth:`paralign.train.meter.Meter.take` does for a line,
        :func:`paralign.train.replicas.find_differences` every ``train.check_every`` steps, and
        :class:`paralign.train.checkpoint.Checkpoints` for checkpoints.

    Raises:
        ConfigError: The checkpoint is of a run with another model, data or optimizer.
        TrainingError: A gradient is not finite, copies of a tensor differ, or a checkpoint cannot
            be written or read.
    """
    with stop_on_signals() as request:
        run = TrainingRun(config, say if dist.get_rank() == 0 else lambda text: None)
        with run.journal:
            return run.train(request)


class TrainingRun:
    """One rank's part of a training run."""

    def __init__(self, config: RunConfig, say: Say) -> None:
        self._config, self._say = config, say
        self._folder = Path(config.train.dir)
        self._program: Program = build_program(
            config.for_training(), training_numerics(config), starts=False
        )
        self._optimizer = build_optimizer(
            config.optimizer, self._program.named_parameters(), fused=True
        )
        self._data = build_data(config.for_training())
        self._held_out = open_held_out(config.for_training())
        section = config.schedule
        self._schedule = Schedule(
            name=section.name,
            num_steps=config.train.steps,
            warmup_steps=section.warmup_steps,
            decay_steps=section.decay_steps,
            min_ratio=section.min_ratio,
        )
        self._checkpoints = Checkpoints(
            self._folder / "checkpoints",
            keep=config.train.keep,
            is_async=config.train.async_save,
        )
        self._meter = Meter(self._program, config)
        self._step = 0
        self._num_tokens = 0
        self._saved_step: int | None = None
        self._resume()
        self._copies = ReplicaCheck(
            self._program, every=config.train.check_every, alike_at=self._step
        )
        self.journal = Journal(
            config, self._folder, step=self._step, is_writer=dist.get_rank() == 0
        )

    def train(self, request: StopRequest) -> Ended:
        """Make the steps that are left."""
        section = self._config.train
        done: Step | None = None
        is_asked = False
        self._meter.begin()
        with (
            garbage_by_hand(section.collect_garbage_every) as collect,
            traced_steps(self._config.profile, self._folder, self._say) as traced,
        ):
            while self._step < section.steps and not is_asked:
                with traced(self._step + 1):
                    done = self.step()
                collect(self._step)
                if self._step % section.log_every == 0 or self._step == section.steps:
                    self._log(done)
                self._meter.pause(self._validate())
                is_asked = request.agreed(self._program.device)
                if section.save_every and self._step % section.save_every == 0:
                    self._save()
        if self._saved_step != self._step:
            self._save()
        self._checkpoints.wait()
        is_complete = self._step >= section.steps
        if not is_complete:
            self._say(f"asked to stop: step {self._step} is saved, the same command goes on there")
        return Ended(self._step, is_complete, None if done is None else done.loss)

    def step(self) -> Step:
        """Make one optimizer step, on the batches that are next."""
        program, train = self._program, self._config.train
        lr = self._config.optimizer.lr * self._schedule.factor(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        first = self._step * train.accumulate
        whole = [self._data.global_batch(first + number) for number in range(train.accumulate)]
        self._meter.count(whole)
        batches = [program.shard(batch) for batch in whole]
        num_tokens = sum(batch.num_global_tokens for batch in batches)
        loss = 0.0
        parts: dict[str, float] = {}
        for batch in batches:
            loss += float(program.step(batch, num_tokens=num_tokens))
            for name, value in program.loss_parts.items():
                parts[name] = parts.get(name, 0.0) + value
        clip = self._config.optimizer.clip
        # Before clipping, which would spread one bad number over all gradients.
        norm = program.grad_norm()
        if bool(torch.isfinite(norm)):
            self._copies.look(self._step + 1)
            if clip is not None:
                program.clip_grad_norm_(clip, norm=norm)
            program.update_routers()
            with on_local_shards():
                self._optimizer.step()
        else:
            self._handle_non_finite(float(norm))
            program.forget_routers()
        self._optimizer.zero_grad()
        self._step += 1
        self._num_tokens += num_tokens
        return Step(loss=loss, loss_parts=parts, norm=float(norm), lr=lr)

    def _handle_non_finite(self, norm: float) -> None:
        """Name the first bad gradient on every rank that has one; stop or go on."""
        everyone: list[Mapping[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, non_finite(self._program.named_parameters()))
        degrees = degrees_of(self._program.mesh)
        lines = [
            f"  - [{degrees.describe_rank(rank)}] {name}: {what}"
            for rank, found in enumerate(everyone)
            for name, what in list(found.items())[:3]
        ]
        title = f"step {self._step + 1}: the gradient norm is {norm}; not finite are"
        text = "\n".join([title, *lines])
        if self._config.train.on_nonfinite == "stop":
            raise TrainingError(
                f"{text}\nNothing has moved since step {self._step}. Lower optimizer.lr, look at "
                "the data of this step, or set train.on_nonfinite=skip."
            )
        self._say(f"{text}\nleft out, as train.on_nonfinite=skip says")

    def _log(self, done: Step) -> None:
        measured = vars(self._meter.take())
        self._report(
            Metrics(step=self._step, **vars(done), num_tokens=self._num_tokens, **measured)
        )

    def _report(self, line: Metrics | Validation) -> None:
        self.journal.write(line)
        self._say(line.text(self._config.train.steps))

    def _validate(self) -> float:
        """Look at the held-out text if it is time to; return how many seconds that took."""
        every, is_end = self._config.validation.every, self._step == self._config.train.steps
        if self._held_out is None or (self._step % every and not is_end):
            return 0.0
        began = time.perf_counter()
        loss, num_tokens = validate(self._program, self._held_out)
        self._report(
            Validation(step=self._step, validation_loss=loss, validation_tokens=num_tokens)
        )
        return time.perf_counter() - began

    def _save(self) -> None:
        state = {
            "num_tokens": self._num_tokens,
            "optimizer_steps": num_optimizer_steps(self._optimizer, self._program.device),
            "corpus": self._data.fingerprint,
            "rows_served": self._rows_served(),
            "config": self._config.model_dump(mode="json"),
        }
        tensors = tensors_of(self._program, self._optimizer)
        self._checkpoints.save(self._step, tensors, state)
        self._saved_step = self._step
        self._say(f"step {self._step}: saving to {self._folder / 'checkpoints'}")

    def _rows_served(self) -> int:
        """Return the position in the data: the rows that all steps so far have seen."""
        return self._step * self._config.train.accumulate * self._config.batch.global_batch

    def _resume(self) -> None:
        chosen: list[Checkpoint | None] = [None]
        if dist.get_rank() == 0 and (found := find_checkpoints(self._folder / "checkpoints")):
            chosen = [found[-1]]
        dist.broadcast_object_list(chosen, src=0)
        [checkpoint] = chosen
        if checkpoint is None:
            if (source := self._config.model.start_from) is not None:
                start_program(self._program, self._config)
                self._say(f"starting from {source}")
            return
        state = checkpoint.state()
        check_holds_all(checkpoint.path, state)
        self._check_same(checkpoint, state)
        parts = [tensors_of(self._program, self._optimizer)]
        if self._program.tied_aliases:
            parts.append(tensors_of_copies(self._program, self._optimizer))
        load(checkpoint, *parts)
        set_optimizer_steps(self._optimizer, state["optimizer_steps"])
        self._step, self._num_tokens = state["step"], state["num_tokens"]
        self._saved_step = self._step
        if state.get("rows_served", self._rows_served()) != self._rows_served():
            raise TrainingError(
                f"{checkpoint.path} has served {state['rows_served']} rows of data in "
                f"{self._step} steps, which are {self._rows_served()} with this config: the data "
                "would not go on where it ended. Use the config that wrote it."
            )
        self._say(f"going on from {checkpoint.path}")

    def _check_same(self, checkpoint: Checkpoint, state: Mapping[str, Any]) -> None:
        """Raise unless the checkpoint is of the same training run, on whatever mesh."""
        ours, theirs = self._config.model_dump(mode="json"), state["config"]
        # An older checkpoint lacks keys that have come since, and has what their defaults say.
        defaults = RunConfig().model_dump(mode="json")
        problems = [
            f"{section}.{key} was {then!r} and is {now!r}"
            for section, keys in [*((one, None) for one in _SAME), ("train", _SAME_TRAIN)]
            for key in keys or sorted({*ours[section], *theirs.get(section, {})})
            if (now := ours[section].get(key))
            != (then := theirs.get(section, {}).get(key, defaults[section].get(key)))
            and (section, key) not in _WHERE
        ]
        then, now = theirs["train"]["steps"], ours["train"]["steps"]
        if then != now and ours["schedule"]["name"] != "constant":
            problems.append(
                f"train.steps was {then} and is {now}, and the learning rate ends there"
            )
        if state["corpus"] != self._data.fingerprint:
            problems.append(
                f"the files of data.source={self._config.data.source!r} have changed, or other "
                "rows of them are held out"
            )
        if problems:
            fix = "Set them back to go on, or set train.dir to a new folder to start a new run"
            raise ConfigError.from_problems(
                f"{checkpoint.path} is of another training run. {fix}", problems
            )


def run_local_rank(config: RunConfig) -> Ended:
    """Train on a rank that ``run_ranks`` has started, whose progress goes to its parent."""
    return run_training(config, report_event)
