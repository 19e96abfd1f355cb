from __future__ import annotations

from types import SimpleNamespace

import pytest

import bench.compare
from bench.compare import EXAMPLE, MODELS, measure
from paralign.config.load import load_config
from tests.parity import make_config


@pytest.mark.ranks
def test_the_phases_of_a_comparison_are_measured():
    config = make_config(mesh={"dp_shard": 2}, pipeline={"num_microbatches": 1})
    cost = measure(config, rounds=1)
    (times,) = cost.rounds
    assert min(times["reference"], times["parallel"], times["compare"]) > 0
    assert times["truth"] == 0  # float64 is its own truth
    assert times["runs"] == times["reference"] + times["parallel"]
    assert cost.ratio == times["compare"] / times["runs"]
    assert cost.num_elements > 10_000


def test_runs_that_are_not_aligned_are_not_measured(monkeypatch):
    misaligned = SimpleNamespace(verdict="misaligned", why="a gradient is twice too large")
    monkeypatch.setattr(bench.compare, "align", lambda config, timeout: misaligned)
    with pytest.raises(RuntimeError, match="misaligned: a gradient is twice too large"):
        measure(make_config(), rounds=1)


def test_every_model_is_a_sound_config():
    for overrides in MODELS.values():
        assert load_config(EXAMPLE, overrides).batch.global_batch == 8
