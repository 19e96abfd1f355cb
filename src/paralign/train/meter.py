"""What a run does between two lines of its metrics: work, time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paralign.config.run import RunConfig
from paralign.launch.device import device_name, peak_memory
from paralign.mesh import degrees_of
from paralign.models.router import named_routers
from paralign.program import Program
from paralign.train.expert_load import expert_loads
from paralign.train.flops import attended_pairs, count_flops
from paralign.train.metrics import ExpertLoad
from paralign.train.peaks import peak_flops


@dataclass(frozen=True, kw_only=True)
class Measured:
    """See :class:`paralign.train.metrics.Metrics`."""

    tokens_per_s: float
    flops_per_s: float
    utilisation: float | None
    peak_memory: int
    pipeline_bubble: float | None
    expert_load: ExpertLoad | None


class Meter:
    """Measures a run, on every rank alike.

    Args:
        program: What trains.
        config: The run.
    """

    def __init__(self, program: Program, config: RunConfig) -> None:
        self._program = program
        self._device = program.device
        self._routers = list(named_routers([program.skeleton]))  # of all stages
        program.clock.is_on = degrees_of(program.mesh).pp > 1
        self._flops = count_flops(program.skeleton, program.blueprint, seq_len=config.batch.seq_len)
        self._peak = peak_flops(
            device_name(program.device), config.precision.compute, config.metrics.peak_tflops
        )
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._began = time.perf_counter()
        self._num_tokens = self._num_flops = 0

    def count(self, global_batches: Iterable[Mapping[str, Tensor]]) -> None:
        """Count the work of batches that are trained on."""
        for batch in global_batches:
            num_tokens = batch["tokens"].numel()
            self._num_tokens += num_tokens
            self._num_flops += self._flops.of(
                num_tokens=num_tokens, num_pairs=attended_pairs(batch)
            )

    def pause(self, seconds: float) -> None:
        """Leave out time that was spent on something else than training."""
        self._began += seconds

    def take(self) -> Measured:
        """Return what was measured since the last call, and begin anew.

        Comm:
            One all-gather of three numbers, and one for each layer with experts, over the world;
            and what :func:`paralign.train.expert_load.expert_loads` does.
        """
        seconds = time.perf_counter() - self._began
        worked, stepped = self._program.clock.take()
        loads = expert_loads(self._program)
        found = self._gather(
            [
                peak_memory(self._device),
                worked,
                stepped,
                *(loads.get(name, 0.0) for name in self._routers),
            ]
        )
        worked, stepped = found[:, 1:3].sum(0).tolist()
        per_second = self._num_flops / seconds
        whole = None if self._peak is None else self._peak * dist.get_world_size()
        measured = Measured(
            tokens_per_s=self._num_tokens / seconds,
            flops_per_s=per_second,
            utilisation=None if whole is None else per_second / whole,
            peak_memory=int(found[:, 0].max()),
            pipeline_bubble=1 - worked / stepped if stepped else None,
            expert_load=self._expert_load(found[:, 3:].amax(0).tolist()),
        )
        self.begin()
        return measured

    def _expert_load(self, loads: list[float]) -> ExpertLoad | None:
        if not loads:
            return None
        worst = max(loads)
        layer = self._routers[loads.index(worst)]
        return ExpertLoad(worst=worst, layer=layer, mean=sum(loads) / len(loads))

    def _gather(self, numbers: list[float]) -> Tensor:
        """Return the numbers of every rank ``[ranks, numbers]``, on the CPU."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu()
