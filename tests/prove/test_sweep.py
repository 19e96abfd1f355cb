from __future__ import annotations

import json

import pytest

from paralign.config.run import ModelSection
from paralign.errors import ConfigError
from paralign.prove.sweep import CellResult, SweepReport, read_results, sweep
from tests.parity import make_config


@pytest.fixture(scope="module")
def config():
    return make_config(
        model={"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 16, "bias": False},
        pipeline={"num_microbatches": 2, "schedule": "GPipe"},
        batch={"global_batch": 4, "seq_len": 16},
        align={"record": "gradients"},
    )


def cell(verdict, name="cp2-GPipe", **more) -> CellResult:
    return CellResult(mesh={"cp": 2}, schedule="GPipe", name=name, verdict=verdict, **more)


def report(*verdicts) -> SweepReport:
    cells = [cell(verdict, f"cell{number}") for number, verdict in enumerate(verdicts)]
    return SweepReport(config=None, world_size=2, dtype="float64", subset="full", cells=cells)


@pytest.mark.ranks
def test_every_legal_cell_is_judged_and_the_others_say_why(config):
    kept: list[int] = []
    done = sweep(config, 2, keep=lambda report: kept.append(report.summary.get("aligned", 0)))
    verdicts = {cell.name: cell.verdict for cell in done.cells}
    for name in ("tp2-GPipe", "cp2-GPipe", "dp_shard2-GPipe", "dp_replicate2-GPipe", "pp2-1F1B"):
        assert verdicts[name] == "aligned"
    assert verdicts["pp2-Interleaved1F1B"] == "refused"  # two layers are no four stages
    assert all(cell.why for cell in done.cells if cell.verdict == "refused")
    assert kept == [1, 2, 3, 4, 5, 6]  # told after every cell, so that nothing is lost
    assert done.exit_status == 0


@pytest.mark.long
@pytest.mark.ranks
def test_experts_are_judged_on_every_degree_of_ep(config):
    experts = {"name": "llama", "preset": "mixtral_tiny", "num_layers": 1}
    changed = config.model_copy(
        update={
            "model": ModelSection.model_validate(experts),
            "mesh": config.mesh.model_copy(update={"ep": 1}),
        }
    )
    done = sweep(changed, 2, subset="pairs")
    verdicts = {cell.name: cell.verdict for cell in done.cells if cell.verdict != "refused"}
    assert {"dp_shard2-ep2-GPipe", "cp2-ep2-GPipe", "tp2-ep2-GPipe"} <= set(verdicts)
    assert set(verdicts.values()) == {"aligned"}


@pytest.mark.ranks
def test_a_used_up_budget_leaves_cells_that_a_later_sweep_runs(config):
    first = sweep(config, 2, budget=1e-3)
    assert first.summary["aligned"] == 1
    assert first.summary["not run"] == 5
    earlier = read_results(first.to_json(), config, 2)
    kept = [cell for cell in earlier if cell.verdict == "aligned"]
    second = sweep(config, 2, subset="pairs", earlier=earlier, budget=1e-3)
    again = {cell.name: cell for cell in second.cells}
    assert again[kept[0].name] == kept[0]
    assert second.summary["aligned"] == 2


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (["aligned", "refused", "not run"], 0),
        (["aligned", "misaligned", "failed"], 1),
        (["aligned", "failed", "inconclusive"], 3),
        (["aligned", "inconclusive"], 4),
        (["refused", "not run"], 4),  # nothing was judged
    ],
)
def test_the_exit_status(verdicts, status):
    assert report(*verdicts).exit_status == status


def test_results_of_another_sweep_are_refused(config):
    mine = SweepReport(
        config=config.model_dump(mode="json"), world_size=2, dtype="float64", subset="full"
    )
    assert read_results(mine.to_json(), config, 2) == []
    with pytest.raises(ConfigError, match="another config or number of ranks"):
        read_results(mine.to_json(), config, 4)
    with pytest.raises(ConfigError, match="another config"):
        read_results(mine.to_json(), make_config(), 2)
    for text in ("{", "{}", json.dumps({"sweep": {"cells": [{"mesh": 1}]}})):
        with pytest.raises(ConfigError, match="no result of a sweep"):
            read_results(text, config, 2)
