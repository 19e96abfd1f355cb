from __future__ import annotations

import time
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from paralign.mesh import build_mesh
from paralign.parallel.stage import Stage
from paralign.parallel.stage_clock import StageClock
from paralign.testing import run_on_ranks
from paralign.train.build import build_data, build_program, training_numerics
from tests.parity import make_config

NAP = 0.06


class _Naps(torch.autograd.Function):
    """Takes as long in the forward as in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        time.sleep(NAP)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        time.sleep(NAP)
        return grads[0]


def _nap(layer: nn.Module, args: object, out: Tensor) -> Any:
    return _Naps.apply(out)


def _shares(config, counts: list[int]) -> list[tuple[float, float]]:
    found = []
    mesh = build_mesh(config.mesh.degrees)
    for count in counts:
        pipeline = config.pipeline.model_copy(update={"num_microbatches": count})
        run = config.model_copy(update={"pipeline": pipeline})
        program = build_program(run, training_numerics(run), mesh=mesh)
        for stage in program.modules:
            assert isinstance(stage, Stage)
            stage.get_submodule(stage.layer_names[0]).register_forward_hook(_nap)
        batch = program.shard(build_data(run).global_batch(0))
        program.step(batch)
        assert program.clock.take() == (0, 0)  # off
        program.clock.is_on = True
        program.step(batch)
        found.append(program.clock.take())
    return found


@pytest.mark.ranks
def test_the_bubble_is_that_of_the_schedule():
    config = make_config(
        mesh={"pp": 2},
        pipeline={"schedule": "GPipe", "num_microbatches": 4},
        batch={"global_batch": 4, "seq_len": 8},
    )
    by_rank = run_on_ranks(_shares, 2, config, [1, 4], timeout=60)
    for column, (count, bubble) in enumerate([(1, 1 / 2), (4, 1 / 5)]):
        work = sum(rank[column][0] for rank in by_rank)
        whole = sum(rank[column][1] for rank in by_rank)
        assert work >= 2 * 2 * count * NAP
        # (stages - 1) / (micro-batches + stages - 1). What is not asleep takes longer when others
        # keep the machine busy; a clock that is wrong shows 0 or 1.
        assert abs(1 - work / whole - bubble) < 0.15


def test_what_is_measured_is_measured_once():
    clock = StageClock(torch.device("cpu"))
    clock.is_on = True
    with clock.step():
        time.sleep(0.01)
    work, whole = clock.take()
    assert work == 0 and whole >= 0.01
    assert clock.take() == (0, 0)


class _Event:
    """Stands for an accelerator's: it is read only when the device has come to it."""

    times: ClassVar = iter([1.0, 2.0, 5.0, 9.0])  # milliseconds
    waited: ClassVar[list[float]] = []

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cuda" and enable_timing

    def record(self) -> None:
        self.time = next(self.times)

    def synchronize(self) -> None:
        self.waited.append(self.time)

    def elapsed_time(self, end: _Event) -> float:
        assert self.waited
        return end.time - self.time


def test_on_an_accelerator_events_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(torch, "Event", _Event)
    clock = StageClock(torch.device("cuda"))
    clock.is_on = True
    with clock.step(), clock.work():
        assert not _Event.waited
    assert clock.take() == (0.003, 0.008)
    assert _Event.waited == [9.0]  # the last one, once
