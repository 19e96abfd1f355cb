"""Models with experts are the same training run on a mesh as on one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from paralign.config.run import RunConfig
from tests.parity import INIT_STD, PANGU, check_result, make_config, measure_all

EXPERTS = {"num_experts": 8, "expert_hidden_size": 24, "balance_loss": 0.02}
MODELS: dict[str, dict[str, Any]] = {
    "pangu_moe": {
        **PANGU,
        **EXPERTS,
        "preset": "tiny",
        "shared_hidden_size": 20,
        "bias_update_speed": 0.01,
    },
    "mixtral": {
        "name": "llama",
        "preset": "mixtral_tiny",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "init_std": INIT_STD,
        **EXPERTS,
    },
    # Many experts for few tokens: some get none, on some ranks or on all.
    "sparse": {
        "name": "llama",
        "preset": "mixtral_tiny",
        "num_layers": 4,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "bias": True,
        "init_std": INIT_STD,
        **EXPERTS,
        "num_experts": 60,
        "top_k": 3,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "router_score": "sigmoid",
        "router_normalise": "none",
        "bias_update_speed": 0.01,
    },
}
MESH = {"pp": 2, "dp_shard": 2, "cp": 2}
GATHER = {"context": {"ulysses_degree": 1}}
BALANCED = {"context": {"ulysses_degree": 1, "load_balance": True}}
Row = tuple[dict[str, int], str, int, dict[str, Any]]
# Every run has all of these, each with one of the models; the others are run by ``-m long``.
RUNS: list[Row] = [
    ({**MESH, "ep": 4}, "1F1B", 4, {"align": {"steps": 2}}),
]
LONG: list[Row] = [
    ({**MESH, "ep": 2}, "ZBVZeroBubble", 4, {"fsdp": {"wrap": "root"}}),
    ({**MESH, "ep": 2}, "Interleaved1F1B", 4, BALANCED),
    (MESH, "GPipe", 1, GATHER),
    (MESH, "1F1B", 4, {"align": {"steps": 2}}),
    ({**MESH, "ep": 4}, "GPipe", 1, {}),
    ({"pp": 2, "dp_replicate": 2, "cp": 2, "ep": 2}, "LoopedBFS", 4, {}),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2, "ep": 2}, "1F1B", 1, {"align": {"steps": 3}}),
    ({"pp": 4, "dp_shard": 2, "ep": 2}, "InterleavedZeroBubble", 4, {"model": {"num_layers": 8}}),
    ({"pp": 2, "dp_shard": 4, "ep": 2}, "DualPipeV", 4, {}),
    ({"dp_shard": 8, "ep": 4}, "GPipe", 1, {"fsdp": {"wrap": "root"}}),
    ({"pp": 2, "dp_shard": 4, "ep": 4}, "1F1B", 4, {"fsdp": {"reshard_after_forward": False}}),
    ({"cp": 4, "pp": 2}, "GPipe", 4, {"align": {"steps": 3}}),
]


def configs(model, runs):
    made = []
    for mesh, schedule, num_microbatches, sections in runs:
        sections = {**sections, "model": {**MODELS[model], **sections.get("model", {})}}
        made.append(
            make_config(
                mesh=mesh,
                pipeline={"schedule": schedule, "num_microbatches": num_microbatches},
                **sections,
            )
        )
    return made


def check_biases(result, config):
    """Biases move by the same whole steps: not to rounding, but to the last bit."""
    biases = [e for (_, name), e in result.errors.items() if name.endswith("router.bias")]
    assert bool(biases) == (config.model.hyper_parameters.get("bias_update_speed") is not None)
    assert set(biases) <= {0.0}


@pytest.mark.ranks
def test_every_gradient_parameter_and_router_bias_is_that_of_one_device():
    models = itertools.cycle(MODELS)
    chosen: dict[int, list[RunConfig]] = {}
    for row in RUNS:
        chosen.setdefault(row[0].get("ep", 1), []).extend(configs(next(models), [row]))
    for same_mesh in chosen.values():
        for config, result in zip(same_mesh, measure_all(same_mesh), strict=True):
            check_result(result)
            check_biases(result, config)


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("number", range(len(RUNS) + len(LONG)))
def test_all_models_on_more_meshes_and_schedules(model, number):
    (config,) = configs(model, (RUNS + LONG)[number : number + 1])
    (result,) = measure_all([config])
    check_result(result)
    check_biases(result, config)
