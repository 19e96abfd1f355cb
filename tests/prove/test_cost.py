"""What ``paralign check`` says a step costs, against what steps on ranks send and hold."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import _PipelineStageBase

from paralign.batch import LocalBatch
from paralign.config.run import RunConfig
from paralign.declaration import declare
from paralign.mesh import build_mesh
from paralign.parallel.data import Precision
from paralign.planning import resolve_plan
from paralign.program import Program
from paralign.prove.cost import RankCost, estimate
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_data,
    build_pieces,
    build_plans,
    build_program,
    build_tensor,
    numerics,
)
from paralign.train.optimizer import build_optimizer
from tests import parity
from tests.parity import make_config
from tests.prove.sent import Counter, Counts, axes_of

TO_EXPERTS = ("all-to-all", "ep")


def measure(configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Return what this rank sends and holds in a step, the second of each config."""
    mesh = build_mesh(configs[0].mesh.degrees)
    seen = []
    for config in configs:
        program = build_program(config, numerics("float32", config), mesh=mesh)
        optimizer = build_optimizer(config.optimizer, program.named_parameters())
        batch = program.shard(build_data(config).global_batch(0))
        program.step(batch)
        with Counter(axes_of(mesh)) as counter:
            program.step(batch)
            program.clip_grad_norm_(1.0)
            program.update_routers()
        weights, grads = most_unsharded(program, batch)
        optimizer.step()
        seen.append(
            {
                "counts": counter.counts,
                "weights": weights,
                "grads": grads,
                "state": state_bytes(program, optimizer),
                "parameters": sum(p.numel() for p in program.parameters()),
            }
        )
    return seen


def most_unsharded(program: Program, batch: LocalBatch) -> tuple[int, int]:
    """Return the most bytes of unsharded weights and gradients of a step at one time."""
    units = [m for stage in program.modules for m in stage.modules() if isinstance(m, FSDPModule)]
    groups = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    parameters = {id(p): p for group in groups for p in group.fsdp_params}
    weights, grads = [0], [0]
    real = _PipelineStageBase.perform_reduce_grad

    def look(stage: Any, factor: int) -> Any:
        held = [x for p in parameters.values() for x in p.all_gather_outputs]
        weights.append(sum(x.untyped_storage().nbytes() for x in held))
        unsharded = [getattr(p, "_unsharded_param", None) for p in parameters.values()]
        waiting = [x.grad for x in unsharded if x is not None and x.grad is not None]
        waiting += [
            p.unsharded_accumulated_grad
            for p in parameters.values()
            if p.unsharded_accumulated_grad is not None
        ]
        grads.append(sum(parity._local(g).numel() * g.element_size() for g in waiting))
        return real(stage, factor)

    with mock.patch.object(_PipelineStageBase, "perform_reduce_grad", look):
        program.step(batch)
    return max(weights), max(grads)


def state_bytes(program: Program, optimizer: torch.optim.Optimizer) -> int:
    held = []
    for parameter in program.parameters():
        held += [parameter, parameter.grad]
        held += [v for v in optimizer.state[parameter].values() if v is not None and v.dim()]
    local = [parity._local(tensor) for tensor in held if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def costs_of(config: RunConfig) -> list[RankCost]:
    model, blueprint = build_pieces(config, torch.float32)
    pipeline, fsdp, _ = build_plans(config)
    degrees = config.mesh.degrees
    precision = Precision(compute=torch.float32, reduce=torch.float32)
    plan = resolve_plan(
        model,
        degrees,
        blueprint,
        pipeline=pipeline,
        fsdp=fsdp,
        precision=precision,
        loss_chunks=config.loss.chunks,
    )
    tensor = build_tensor(config)
    declared = declare(model, blueprint, degrees=degrees, plan=plan, fsdp=fsdp, tensor=tensor)
    return estimate(model, blueprint, config=config, plan=plan, declared=declared)


def counts_of(cost: RankCost) -> Counts:
    counts: Counts = {}
    for item in cost.traffic:
        calls, total = counts.get((item.collective, item.axis), (0, 0))
        counts[item.collective, item.axis] = (calls + item.calls, total + item.num_bytes)
    return counts


LLAMA = {**parity.BASE["model"], "num_heads": 8}
TIED = {**parity.BASE["model"], "tie_embeddings": True}
MOE = {
    **parity.PANGU,
    "preset": "tiny",
    "num_experts": 4,
    "expert_hidden_size": 24,
    "shared_hidden_size": 20,
}
SMALL = {"global_batch": 8, "seq_len": 16}


def pipe(schedule: str, m: int, **rest: Any) -> dict[str, Any]:
    return {"schedule": schedule, "num_microbatches": m, **rest}


# Mesh -> configs that one world of ranks runs.
CASES: dict[str, list[dict[str, Any]]] = {
    "pp dp_shard cp": [
        {"pipeline": pipe("GPipe", 4)},
        {"pipeline": pipe("1F1B", 4), "fsdp": {"reshard_after_forward": True}},
        {"pipeline": pipe("Interleaved1F1B", 4), "fsdp": {"wrap": "first_block"}},
        {"pipeline": pipe("ZBVZeroBubble", 4), "model": TIED},
        {"pipeline": pipe("1F1B", 2), "model": TIED, "fsdp": {"reshard_after_forward": False}},
        {
            "pipeline": pipe("GPipe", 1),
            "fsdp": {"wrap": [["embedding", "layers.0"]]},
            "context": {"ulysses_degree": 1, "load_balance": True},
        },
        {"pipeline": pipe("GPipe", 2), "model": parity.PANGU},
    ],
    "pp dp_replicate": [{"pipeline": pipe("GPipe", 2)}],
    "cp": [  # two key/value heads for four ranks: repeated
        {"pipeline": pipe("GPipe", 2), "model": LLAMA},
        {"pipeline": pipe("GPipe", 1), "model": LLAMA, "context": {"ulysses_degree": 2}},
    ],
    "pp dp_shard tp": [
        {"pipeline": pipe("1F1B", 2)},
        {"pipeline": pipe("GPipe", 1), "tensor": {"sequence_parallel": False}},
        {"pipeline": pipe("GPipe", 2), "loss": {"chunks": 3}},
        {
            "pipeline": pipe("1F1B", 2),
            "loss": {"chunks": 2},
            "tensor": {"sequence_parallel": False},
        },
        {"pipeline": pipe("GPipe", 1), "tensor": {"overlap": "chunks"}},
        {"pipeline": pipe("GPipe", 2), "tensor": {"overlap": "chunks"}, "loss": {"chunks": 3}},
        {"pipeline": pipe("ZBVZeroBubble", 4), "model": {**parity.PANGU, "tie_embeddings": True}},
    ],
    "cp tp": [  # two key/value heads for two ranks of tp, then for two of cp
        {"pipeline": pipe("GPipe", 2), "model": LLAMA},
        {
            "pipeline": pipe("GPipe", 1),
            "model": parity.PANGU,
            "context": {"ulysses_degree": 1},
            "tensor": {"sequence_parallel": False},
        },
        {"pipeline": pipe("GPipe", 1), "model": parity.PANGU, "tensor": {"overlap": "chunks"}},
    ],
    "pp tp": [{"pipeline": pipe("GPipe", 1)}],  # two key/value heads for four ranks
    "one rank": [{"pipeline": pipe("GPipe", 2)}],
    "pp dp_shard ep": [{"pipeline": pipe("1F1B", 2), "model": MOE}],
    "pp cp ep": [{"pipeline": pipe("GPipe", 1), "model": MOE}],
    "dp_shard tp ep": [
        {"pipeline": pipe("GPipe", 2), "model": MOE},
        {"pipeline": pipe("GPipe", 1), "model": MOE, "tensor": {"sequence_parallel": False}},
    ],
    "pp cp tp of experts": [
        {"pipeline": pipe("GPipe", 1), "model": MOE, "tensor": {"sequence_parallel": False}},
    ],
}
MESHES = {
    "pp dp_shard cp": {"pp": 2, "dp_shard": 2, "cp": 2},
    "pp dp_replicate": {"pp": 2, "dp_replicate": 2},
    "cp": {"cp": 4},
    "pp dp_shard tp": {"pp": 2, "dp_shard": 2, "tp": 2},
    "cp tp": {"cp": 2, "tp": 2},
    "pp tp": {"pp": 2, "tp": 4},
    "one rank": {},
    "pp dp_shard ep": {"pp": 2, "dp_shard": 4, "ep": 2},
    "pp cp ep": {"pp": 2, "cp": 4, "ep": 2},
    "dp_shard tp ep": {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4},
    "pp cp tp of experts": {"pp": 2, "cp": 2, "tp": 2},
}


def by_pp_rank(config: RunConfig, outcomes: list[Any]) -> list[list[Any]]:
    degrees = config.mesh.degrees
    groups: list[list[Any]] = [[] for _ in range(degrees.pp)]
    for rank, outcome in enumerate(outcomes):
        groups[degrees.coordinates(rank)["pp"]].append(outcome)
    return groups


def named(counts: Counts, config: RunConfig) -> Counts:
    """Rename a measured axis as ``check`` calls it, where groups have the same ranks."""
    degrees = config.mesh.degrees
    renamed: Counts = {}
    for (kind, axis), (calls, sent) in counts.items():
        if degrees.fsdp == degrees.world_size and axis == "world" and kind != "all-reduce":
            axis = "cp"
        if axis == "cp x tp" and kind != "all-reduce":
            axis = "efsdp"
        if axis == "dp_shard x tp" and kind == "all-to-all":
            axis = "ep"
        if axis.startswith("("):
            axis = "cp"  # one of the two parts of a hybrid
        if sent:  # a group of one rank moves nothing
            old = renamed.get((kind, axis), (0, 0))
            renamed[kind, axis] = (old[0] + calls, old[1] + sent)
    return renamed


# The others mix the kinds of traffic, and have those of a pipeline.
DAILY = {"one rank", "dp_shard tp ep"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "mesh",
    [mesh if mesh in DAILY else pytest.param(mesh, marks=pytest.mark.long) for mesh in CASES],
)
def test_a_step_sends_and_holds_what_check_says(mesh):
    configs = [make_config(mesh=MESHES[mesh], batch=SMALL, **case) for case in CASES[mesh]]
    world = configs[0].mesh.degrees.world_size
    outcomes = run_on_ranks(measure, world, configs, timeout=120)
    for number, config in enumerate(configs):
        groups = by_pp_rank(config, [outcome[number] for outcome in outcomes])
        for cost, ranks in zip(costs_of(config), groups, strict=True):
            what = (CASES[mesh][number], cost.pp_rank)
            for seen in ranks:
                counts, expected = named(seen["counts"], config), counts_of(cost)
                # How many tokens leave a rank is the router's choice.
                travelled, most = counts.pop(TO_EXPERTS, (0, 0)), expected.pop(TO_EXPERTS, (0, 0))
                assert travelled[0] == most[0] and travelled[1] <= most[1], what
                assert (travelled[1] > 0) is (config.mesh.ep > 1), what
                assert counts == expected, what
                assert (seen["weights"], seen["grads"]) == (
                    cost.gathered_bytes,
                    cost.gradient_bytes,
                ), what
                assert seen["state"] == cost.state_bytes, what
                assert seen["parameters"] == cost.num_parameters, what


AT_MOST = [
    {"pipeline": pipe("Interleaved1F1B", 2, stages_per_rank=4)},
    {"pipeline": pipe("LoopedBFS", 2), "fsdp": {"reshard_after_forward": True}},
]


@pytest.mark.long
@pytest.mark.ranks
def test_what_depends_on_the_order_of_stages_is_an_upper_bound():
    model = {**parity.BASE["model"], "num_layers": 8}
    mesh = {"pp": 2, "dp_shard": 2}
    configs = [make_config(mesh=mesh, batch=SMALL, model=model, **case) for case in AT_MOST]
    outcomes = run_on_ranks(measure, 4, configs, timeout=120)
    less = set()
    for number, config in enumerate(configs):
        groups = by_pp_rank(config, [outcome[number] for outcome in outcomes])
        for cost, ranks in zip(costs_of(config), groups, strict=True):
            flagged = {(t.collective, t.axis) for t in cost.traffic if t.at_most}
            expected = counts_of(cost)
            for seen in ranks:
                counts = named(seen["counts"], config)
                assert counts.keys() == expected.keys()
                for key, (calls, sent) in counts.items():
                    if key in flagged:
                        assert calls <= expected[key][0] and sent <= expected[key][1]
                        less |= {"gathers"} if calls < expected[key][0] else set()
                    else:
                        assert (calls, sent) == expected[key]
                assert seen["weights"] <= cost.gathered_bytes
                assert seen["grads"] <= cost.gradient_bytes
                less |= {"memory"} if seen["weights"] < cost.gathered_bytes else set()
    assert less == {"gathers", "memory"}  # else they could be exact


def test_memory_of_each_optimizer():
    def state(**optimizer: Any) -> float:
        config = make_config(mesh={}, optimizer={"lr": 1.0, **optimizer})
        (cost,) = costs_of(config)
        return cost.state_bytes / (4 * cost.num_parameters)

    assert state(name="adamw") == 4  # weights, gradients, two moments
    assert state(name="sgd") == 2
    assert state(name="sgd", momentum=0.9) == 3


def test_large_tensors_do_not_travel_together():
    def exchanges(seq_len: int) -> int:
        config = make_config(
            mesh={"cp": 2},
            pipeline=pipe("GPipe", 1),
            batch={"global_batch": 4, "seq_len": seq_len},
        )
        (cost,) = costs_of(config)
        return counts_of(cost)["all-to-all", "cp"][0]

    # Four layers, forward and backward: q, k and v in one call, or in three; and the output.
    assert exchanges(64) == 4 * 2 * 2
    assert exchanges(4096) == 4 * 2 * 4


def test_shards_are_rounded_up_to_the_largest():
    config = make_config(
        model={**parity.BASE["model"], "vocab_size": 257, "tie_embeddings": True},
        mesh={"pp": 2, "dp_shard": 2},
    )
    cost = costs_of(config)[0]
    width = 32
    # 257 rows make shards of 129 rows: one row more than the table has.
    assert cost.gathered_bytes == 4 * (cost.num_parameters + width)
    (tied,) = [item for item in cost.traffic if item.what == "tied gradient"]
    assert (tied.calls, tied.num_bytes, tied.at_most) == (1, 4 * 129 * width, True)
