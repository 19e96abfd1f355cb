"""Dropout drops the same features of the same tokens on every mesh as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from paralign.align import compare
from paralign.errors import RankError
from paralign.launch import run_ranks
from paralign.prove.reference import run_reference
from paralign.train.build import numerics
from tests.equivalence.broken import run_broken
from tests.equivalence.test_moe import MODELS
from tests.parity import BASE, PANGU, check_result, make_config, measure_all

pytestmark = pytest.mark.ranks

DROPOUT = 0.2
LLAMA = {**BASE["model"], "dropout": DROPOUT}
TWO_STEPS = {"align": {"steps": 2}}
PARTS = {"recompute": {"parts": ["*_dropout", "*_norm", "ffn"]}}
BLOCK = {"recompute": {"parts": "block"}}
BALANCED = {"context": {"ulysses_degree": 1, "load_balance": True}}
WHOLE = {"tensor": {"sequence_parallel": False}}


def pipeline(schedule: str, num_microbatches: int) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule, "num_microbatches": num_microbatches}}


ROOT = {"fsdp": {"wrap": "root"}}
# Each line is one world.
RUNS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "pp and fsdp": (
        {"pp": 2, "dp_shard": 2},
        [
            {**pipeline("1F1B", 4), **TWO_STEPS},
            {**pipeline("Interleaved1F1B", 4), **BLOCK},
        ],
    ),
    "cp and tp": ({"cp": 2, "tp": 2}, [{**BALANCED, **PARTS}, {**WHOLE, **BLOCK}]),
}
LONG: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "other schedules": (
        {"pp": 2, "dp_shard": 2},
        [{**pipeline("GPipe", 2), **PARTS}, {**pipeline("ZBVZeroBubble", 4), **ROOT}],
    ),
    "latent attention": ({"cp": 2, "tp": 2}, [{"model": {**PANGU, "dropout": DROPOUT}}]),
    "experts": (
        {"dp_shard": 2, "tp": 2, "ep": 2},
        [
            {"model": {**MODELS["mixtral"], "dropout": DROPOUT}},
            {"model": {**MODELS["pangu_moe"], "dropout": DROPOUT}, **WHOLE, **BLOCK},
        ],
    ),
    "pp, fsdp and cp": (
        {"pp": 2, "dp_shard": 2, "cp": 2},
        [
            {**pipeline("1F1B", 4), **BALANCED, **TWO_STEPS},
            {**pipeline("LoopedBFS", 2), "loss": {"chunks": 2}},
            {**pipeline("InterleavedZeroBubble", 4), **ROOT},
            {**pipeline("DualPipeV", 4), **ROOT},
        ],
    ),
    "pp, fsdp and tp": (
        {"pp": 2, "dp_shard": 2, "tp": 2},
        [{**pipeline("1F1B", 2), "tensor": {"overlap": "chunks"}}, {**WHOLE, **PARTS}],
    ),
    "replicas, experts and cp": (
        {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 4},
        [
            {"model": {**MODELS["mixtral"], "dropout": DROPOUT}, **BALANCED},
            {"model": {**MODELS["pangu_moe"], "dropout": DROPOUT}, **TWO_STEPS},
        ],
    ),
    "tied": (
        {"pp": 2, "dp_shard": 2},
        [{"model": {**LLAMA, "tie_embeddings": True, "bias": False}, **pipeline("1F1B", 4)}],
    ),
}


@pytest.mark.parametrize(
    "name", [*RUNS, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_every_mesh_drops_what_one_device_drops(name):
    mesh, runs = {**RUNS, **LONG}[name]
    configs = [make_config(**{"model": LLAMA, **sections}, mesh=mesh) for sections in runs]
    for config, result in zip(configs, measure_all(configs), strict=True):
        assert config.model.hyper_parameters["dropout"] == DROPOUT
        check_result(result)


# What is broken -> the mesh on which it shows.
BREAKS = {
    "masks_by_rank": {"dp_replicate": 2},
    "masks_by_local_row": {"dp_shard": 2},
    "masks_by_local_position": {"cp": 2},
    "masks_by_layer_of_the_stage": {"pp": 2},
    "masks_alike_on_parts_of_the_stream": {"tp": 2},
    "masks_drawn_again_when_recomputed": {"pp": 2},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken") / "reference"
    config = make_config(model=LLAMA)
    run_ranks(run_reference, 1, config, numerics("float64", config), folder)
    return folder


def judge(name: str, mesh: dict[str, int], reference: Any, folder: Any) -> Any:
    config = make_config(model=LLAMA, mesh=mesh, **BLOCK)
    run_ranks(run_broken, 2, name, config, folder / name)
    return compare(reference, folder / name)


@pytest.mark.parametrize(
    "name",
    [
        "masks_by_local_position",
        *(pytest.param(n, marks=pytest.mark.long) for n in BREAKS if not n.endswith("position")),
    ],
)
def test_masks_that_depend_on_the_mesh_are_caught(name, reference, tmp_path):
    report = judge(name, BREAKS[name], reference, tmp_path)
    assert report.verdict == "misaligned"
    off = {row.name for row in report.tensors if row.kind == "grad" and not row.ok}
    assert "layers.3.attention.wq.weight" in off


@pytest.mark.long
def test_the_unbroken_run_is_aligned(reference, tmp_path):
    report = judge("nothing", {"pp": 2}, reference, tmp_path)
    assert report.verdict == "aligned", report.why


@pytest.mark.long
def test_parts_of_the_stream_that_nobody_told_of_are_refused(reference, tmp_path):
    # The engine's message hides the LayoutError; tests/test_dropout.py has it.
    with pytest.raises(RankError, match=r"failed to run forward"):
        judge("dropouts_not_told_of_tp", {"tp": 2}, reference, tmp_path)
