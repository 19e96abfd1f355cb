"""Experts together with tensor parallelism are the same training run as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equivalence.test_moe import MODELS, check_biases
from tests.parity import check_result, make_config, measure_all

OFF = {"tensor": {"sequence_parallel": False}}
CHUNKS = {"tensor": {"overlap": "chunks"}}
BLOCK = {"parts": "block"}
BALANCED = {"context": {"ulysses_degree": 1, "load_balance": True}}
MESHES: dict[str, dict[str, int]] = {
    "tp ep2": {"tp": 2, "ep": 2},
    "tp": {"dp_shard": 2, "tp": 2},
    "pp dp_shard tp ep2": {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
    "cp tp ep4": {"cp": 2, "tp": 2, "ep": 4},
    "dp_shard4 tp ep4": {"dp_shard": 4, "tp": 2, "ep": 4},
    "dp_shard4 tp ep8": {"dp_shard": 4, "tp": 2, "ep": 8},
    "dp_replicate cp tp ep2": {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2},
    "pp tp4 ep2": {"pp": 2, "tp": 4, "ep": 2},
}
Case = tuple[str, str, int, dict[str, Any]]
# Every run has all of these; the others are run by ``-m long``.
CASES: dict[str, list[Case]] = {
    "pp dp_shard tp ep2": [
        ("pangu_moe", "1F1B", 4, {"align": {"steps": 5}}),
        ("mixtral", "ZBVZeroBubble", 4, {**OFF, "fsdp": {"wrap": "root"}}),
    ],
    "cp tp ep4": [
        ("sparse", "GPipe", 1, {}),
        ("pangu_moe", "GPipe", 1, {**OFF, "align": {"steps": 2}}),
    ],
}
LONG: dict[str, list[Case]] = {
    "tp ep2": [
        ("mixtral", "GPipe", 1, {}),
        ("pangu_moe", "1F1B", 4, {**OFF, "align": {"steps": 5}}),
        ("sparse", "1F1B", 4, CHUNKS),
    ],
    "tp": [
        ("mixtral", "1F1B", 2, {"model": {"tie_embeddings": True}, "recompute": BLOCK}),
        ("sparse", "GPipe", 1, OFF),
        ("pangu_moe", "1F1B", 4, {"recompute": {"parts": ["ffn.router", "ffn.experts"]}}),
    ],
    "pp dp_shard tp ep2": [
        ("sparse", "Interleaved1F1B", 4, OFF),
        ("pangu_moe", "GPipe", 2, {"recompute": BLOCK}),
        ("mixtral", "1F1B", 2, {"loss": {"chunks": 2}, "fsdp": {"reshard_after_forward": True}}),
        ("pangu_moe", "DualPipeV", 4, {"model": {"tie_embeddings": True}}),
        ("mixtral", "LoopedBFS", 2, {**CHUNKS, "fsdp": {"wrap": "first_block"}}),
    ],
    "cp tp ep4": [
        ("mixtral", "1F1B", 4, BALANCED),
        ("pangu_moe", "1F1B", 2, {**OFF, **BALANCED}),
    ],
    "dp_shard4 tp ep4": [
        ("pangu_moe", "GPipe", 1, {"align": {"steps": 5}}),
        ("mixtral", "1F1B", 2, {**OFF, "loss": {"chunks": 2}}),
        ("sparse", "1F1B", 4, CHUNKS),
    ],
    "dp_shard4 tp ep8": [("mixtral", "1F1B", 2, {}), ("pangu_moe", "GPipe", 1, OFF)],
    "dp_replicate cp tp ep2": [
        ("pangu_moe", "1F1B", 2, {"align": {"steps": 3}}),
        ("mixtral", "GPipe", 4, OFF),
    ],
    "pp tp4 ep2": [
        ("pangu_moe", "InterleavedZeroBubble", 4, {}),
        ("mixtral", "GPipe", 1, OFF),
    ],
}


def check_cases(mesh: str, cases: list[Case]) -> None:
    configs = []
    for model, schedule, num_microbatches, sections in cases:
        sections = {**sections, "model": {**MODELS[model], **sections.get("model", {})}}
        configs.append(
            make_config(
                mesh=MESHES[mesh],
                pipeline={"schedule": schedule, "num_microbatches": num_microbatches},
                **sections,
            )
        )
    results = measure_all(configs, timeout=300)
    for case, config, result in zip(cases, configs, results, strict=True):
        try:
            check_result(result)
            check_biases(result, config)
        except AssertionError as error:
            raise AssertionError(f"{mesh}: {case}") from error
        assert result.clipped


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [m if m == "cp tp ep4" else pytest.param(m, marks=pytest.mark.long) for m in CASES],
)
def test_every_gradient_parameter_and_router_bias_is_that_of_one_device(mesh):
    check_cases(mesh, CASES[mesh])


@pytest.mark.long
@pytest.mark.parametrize("mesh", LONG)
def test_more_plans_are_the_run_of_one_device(mesh):
    check_cases(mesh, LONG[mesh])
