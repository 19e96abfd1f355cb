"""Pipeline parallelism: runs one step of a schedule over this rank's stages.

The one module that drives torch's schedule runtime. It hands torch static stages, whose shapes are
known from the meta device, so that no forward runs twice; it switches torch's own gradient scaling
off, because the loss is already divided by the global token count; and it builds a schedule for
every batch shape it meets, because torch's buffers fit only the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from paralign.blueprint import Blueprint
from paralign.mesh import Axis
from paralign.parallel.gradients import Taken, give_back, take_gradients
from paralign.parallel.relay import run_forward
from paralign.parallel.stage import Stage, boundary_tensors
from paralign.parallel.stage_clock import StageClock, TimedStage
from paralign.parallel.stages import rank_of_stage, split_layers
from paralign.parallel.support import Plan

# Schedules hold receive buffers; batches come in few shapes.
_MOST_SHAPES = 8


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a pipeline.

    Attributes:
        schedule: One of torch's schedules, in any case.
        num_microbatches: Micro-batches a step; the rows of a rank's batch must divide by it.
        stages_per_rank: None: 1, or 2 for a schedule with virtual stages.
        layers_per_stage: Layers of every stage in model order; None splits evenly.
    """

    schedule: str = "1F1B"
    num_microbatches: int = field(default=1, kw_only=True)
    stages_per_rank: int | None = field(default=None, kw_only=True)
    layers_per_stage: tuple[int, ...] | None = field(default=None, kw_only=True)


class PipelineRuntime:
    """Runs forward and backward of every micro-batch through this rank's stages.

    Args:
        stages: Stage index -> module, for the stages of this rank, in index order.
        plan: The resolved plan.
        blueprint: How the pieces are composed.
        skeleton: The whole model on the meta device in the compute dtype.
        mesh: The run's mesh.
        device: Where the stages are.
        stream_parts: Ranks that share a rank's tokens between stages: tp with sequence parallel.
        stream_dtype: What the stream between layers must be in, where it was asked for.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        *,
        plan: Plan,
        blueprint: Blueprint,
        skeleton: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        stream_parts: int = 1,
        stream_dtype: torch.dtype | None = None,
    ) -> None:
        assert plan.num_layers is not None
        self._stages = dict(stages)
        self._plan = plan
        self._blueprint = blueprint
        self._skeleton = skeleton
        self._splits = split_layers(plan.num_layers, plan.num_stages, plan.layers_per_stage)
        self._group = mesh[str(Axis.PP)].get_group()
        self._device = device
        self._stream_parts = stream_parts
        self._stream_dtype = stream_dtype
        self._schedules: dict[tuple[int, int], Any] = {}  # (rows, local sequence) -> schedule
        self._entries: dict[tuple[int, int], list[Tensor]] = {}  # the same -> inputs of stages
        self._normaliser = 1.0
        self.clock = StageClock(device)

    @property
    def blueprint(self) -> Blueprint:
        """How the pieces are composed."""
        return self._blueprint

    @property
    def skeleton(self) -> nn.Module:
        """The whole model on the meta device in the compute dtype; it has no weights."""
        return self._skeleton

    def knows(self, shape: torch.Size) -> bool:
        """Whether a schedule for local batches of this shape has been built."""
        return tuple(shape) in self._schedules

    def step(
        self, tensors: Mapping[str, Tensor], *, seq_len: int, normaliser: float
    ) -> Tensor | None:
        """Run one step; afterwards every unit has reduced its gradients once.

        Shapes (B local rows, S local sequence):
            tensors: ``tokens``, ``labels`` and ``positions``, each ``[B, S]``; maybe ``documents``.
            returns: on the rank that runs the last stage, this rank's share of the loss: the sum
                over its own tokens divided by ``normaliser``. None on other ranks.

        Comm (per micro-batch, b rows, width D):
            one send of ``b * S * D`` elements between neighbouring stages forward, one backward.

        Args:
            tensors: This rank's batch.
            seq_len: Global sequence length.
            normaliser: What the sum of token losses is divided by: the number of valid tokens of
                the global batch, known before the first backward pass.
        """
        rows, local_seq = tensors["tokens"].shape
        schedule = self._schedules.get((rows, local_seq))
        earlier: Taken = []
        if schedule is None:
            if len(self._schedules) == _MOST_SHAPES:
                del self._schedules[next(iter(self._schedules))]  # the oldest
            schedule = self._schedules[rows, local_seq] = self._build(rows, local_seq)
            # A schedule clears every gradient at its first step, those of earlier steps as well.
            earlier = take_gradients(
                [p for stage in self._stages.values() for p in stage.parameters()]
            )
        self._normaliser = normaliser
        self._tell(seq_len, normaliser)

        args = (tensors["tokens"],) if 0 in self._stages else ()
        losses: list[Tensor] | None = None
        if self._plan.num_stages - 1 in self._stages:
            losses = []
        # Every tensor has rows first: torch cuts all of them on dim 0 into micro-batches.
        with self.clock.step():
            schedule.step(
                *args, target=tensors["labels"], losses=losses, return_outputs=False, **tensors
            )
        give_back(earlier)
        return None if losses is None else torch.stack([loss.detach() for loss in losses]).sum()

    @torch.no_grad()
    def evaluate(
        self, tensors: Mapping[str, Tensor], *, seq_len: int, normaliser: float
    ) -> Tensor | None:
        """Run the forward pass of every micro-batch, without a schedule and without gradients.

        A schedule of torch's would run every stage once more each time it changes between training
        and evaluation, and clear gradients. Arguments, shapes and the result are those of
        :meth:`step`.

        Comm (per micro-batch): the forward half of what :meth:`step` sends.
        """
        rows, local_seq = tensors["tokens"].shape
        if (rows, local_seq) not in self._entries:
            inputs = [entry for entry, _ in self._boundaries(rows, local_seq)]
            self._entries = {(rows, local_seq): inputs}
        self._tell(seq_len, normaliser)
        losses = run_forward(
            self._stages,
            self._entries[rows, local_seq],
            _cut(tensors, self._plan.num_microbatches),
            rank_of=partial(rank_of_stage, self._plan.kind, self._plan.pp),
            group=self._group,
            device=self._device,
        )
        return torch.stack(losses).sum() / normaliser if losses else None

    def _tell(self, seq_len: int, normaliser: float) -> None:
        for stage in self._stages.values():
            stage.seq_len = seq_len
            stage.normaliser = normaliser

    def _boundaries(self, rows: int, local_seq: int) -> list[tuple[Tensor, Tensor]]:
        return boundary_tensors(
            self._skeleton,
            self._blueprint,
            splits=self._splits,
            rows=rows // self._plan.num_microbatches,
            local_seq=local_seq,
            stream_parts=self._stream_parts,
            chunks_loss=self._plan.loss_chunks > 1,
            stream_dtype=self._stream_dtype,
        )

    def _build(self, rows: int, local_seq: int) -> Any:
        num_microbatches = self._plan.num_microbatches
        boundaries = self._boundaries(rows, local_seq)
        stages = [
            TimedStage(
                stage,
                index,
                self._plan.num_stages,
                self._device,
                input_args=boundaries[index][0],
                output_args=boundaries[index][1],
                group=self._group,
                clock=self.clock,
            )
            for index, stage in self._stages.items()
        ]
        schedule_class = get_schedule_class(self._plan.kind.name)
        is_single = issubclass(schedule_class, PipelineScheduleSingle)
        return schedule_class(
            stages[0] if is_single else stages,
            num_microbatches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    def _loss(self, loss_sum: Tensor, labels: Tensor) -> Tensor:
        # The one scale factor of the project. The last stage has used the labels already.
        return loss_sum / self._normaliser


def _cut(tensors: Mapping[str, Tensor], num_pieces: int) -> list[dict[str, Tensor]]:
    """Cut rows into micro-batches, as torch's schedules do."""
    pieces = {name: torch.tensor_split(tensor, num_pieces) for name, tensor in tensors.items()}
    return [{name: parts[at] for name, parts in pieces.items()} for at in range(num_pieces)]
