from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from paralign.mesh import build_mesh
from paralign.testing import run_on_ranks
from paralign.train import meter
from paralign.train.build import build_data, build_program, training_numerics
from paralign.train.flops import attended_pairs, count_flops
from tests.parity import make_config

pytestmark = pytest.mark.ranks

CONFIG: dict[str, Any] = {
    "batch": {"global_batch": 4, "seq_len": 16},
    "pipeline": {"schedule": "GPipe", "num_microbatches": 2},
    "metrics": {"peak_tflops": 1.0e-4},
}


def _measure(config: Any) -> list[Any]:
    program = build_program(config, training_numerics(config), mesh=build_mesh(config.mesh.degrees))
    batch = build_data(config).global_batch(0)
    now = [5.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    with mock.patch.object(meter, "time", clock):
        measured = meter.Meter(program, config)
        now[0] = 100.0
        measured.begin()
        measured.count([batch, batch])
        held = torch.ones(torch.distributed.get_rank() * 64 * 2**20, dtype=torch.uint8)
        now[0] = 100.5
        first = measured.take()
        measured.count([batch])
        now[0] = 101.5
        measured.pause(0.75)
        second = measured.take()
    assert held.numel() in (0, 64 * 2**20)
    flops = count_flops(program.skeleton, program.blueprint, seq_len=config.batch.seq_len)
    one = flops.of(num_tokens=64, num_pairs=attended_pairs(batch))
    return [first, second, one]


def test_rates_are_work_over_time_and_memory_is_that_of_the_largest_rank():
    config = make_config(mesh={"pp": 2}, **CONFIG)
    (first, second, one), (other, *_) = run_on_ranks(_measure, 2, config, timeout=60)
    assert first.tokens_per_s == 2 * 64 / 0.5  # without what came before begin
    assert first.flops_per_s == 2 * one / 0.5
    assert first.utilisation == pytest.approx(first.flops_per_s / (2 * 1e8))
    assert second.tokens_per_s == 64 / 0.25  # without the pause
    assert first.peak_memory == other.peak_memory > 64 * 2**20
    assert second.peak_memory >= first.peak_memory
