from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.distributed.tensor import DTensor, Replicate, Shard

from paralign.batch import LocalBatch
from paralign.config.run import RunConfig
from paralign.declaration import ParameterDeclaration, declare
from paralign.mesh import Axis, Degrees, build_mesh
from paralign.parallel.data import ROOT_UNIT, Precision
from paralign.planning import resolve_plan
from paralign.program import Program
from paralign.testing import run_on_ranks
from paralign.train.build import (
    build_data,
    build_pieces,
    build_plans,
    build_program,
    build_tensor,
    numerics,
)
from tests import parity
from tests.parity import GRAD_TOLERANCE, make_config

MOE = {
    **parity.PANGU,
    "preset": "tiny",
    "num_experts": 4,
    "expert_hidden_size": 24,
    "shared_hidden_size": 20,
}
TIED = {**parity.BASE["model"], "tie_embeddings": True}


def declared_of(config: RunConfig, *, frozen: tuple[str, ...] = ()) -> list[ParameterDeclaration]:
    model, blueprint = build_pieces(config, torch.float64)
    parity.freeze(model, frozen)
    pipeline, fsdp, _ = build_plans(config)
    degrees = config.mesh.degrees
    plan = resolve_plan(
        model, degrees, blueprint, pipeline=pipeline, fsdp=fsdp, precision=Precision()
    )
    tensor = build_tensor(config)
    return declare(model, blueprint, degrees=degrees, plan=plan, fsdp=fsdp, tensor=tensor)


def by_name(declared: list[ParameterDeclaration]) -> dict[str, ParameterDeclaration]:
    found = {p.name: p for p in declared}
    assert len(found) == len(declared)
    return found


def test_what_a_plan_says_about_a_parameter():
    config = make_config(
        mesh={"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2},
        pipeline={"schedule": "ZBVZeroBubble", "num_microbatches": 2},
    )
    assert by_name(declared_of(config))["layers.2.attention.wk.weight"] == ParameterDeclaration(
        name="layers.2.attention.wk.weight",
        shape=(16, 32),
        trainable=True,
        stage=2,
        pp_rank=1,
        unit="layers.2",
        placements={
            "dp_shard": "shard(0)",
            "cp": "shard(0)",
            "pp": "stage",
            "dp_replicate": "replicate",
        },
        partial_over=("dp_replicate", "dp_shard", "cp"),
        tied_to=None,
    )


def test_what_tp_does_is_said_of_each_parameter():
    declared = by_name(declared_of(make_config(mesh={"dp_shard": 2, "tp": 4})))
    said = {
        name: (declared[name].placements["tp"], declared[name].partial_over)
        for name in (
            "layers.0.attention.wq.weight",
            "layers.0.attention.wo.weight",
            "layers.0.attention.wk.weight",  # two heads for four ranks
            "norm.weight",
        )
    }
    assert list(said.values()) == [
        ("shard(0)", ("dp_shard",)),
        ("shard(1)", ("dp_shard",)),
        ("replicate", ("dp_shard", "tp")),
        ("replicate", ("dp_shard", "tp")),
    ]


def test_axes_of_one_rank_are_left_out():
    for p in declared_of(make_config(mesh={"cp": 2})):
        assert (dict(p.placements), p.partial_over) == ({"cp": "shard(0)"}, ("cp",))
    for p in declared_of(make_config(mesh={})):
        assert (dict(p.placements), p.partial_over) == ({}, ())


def test_parameters_are_declared_in_the_models_order():
    config = make_config(mesh={"pp": 2})
    model, _ = build_pieces(config, torch.float64)
    assert [p.name for p in declared_of(config)] == [n for n, _ in model.named_parameters()]


def test_frozen_parameters_are_declared_as_such():
    declared = declared_of(make_config(mesh={}), frozen=("embedding.*",))
    assert [p.name for p in declared if not p.trainable] == ["embedding.weight"]


@pytest.mark.parametrize(
    ("schedule", "pp", "expected"),
    [
        ("GPipe", 1, None),  # one parameter, declared once
        ("1F1B", 2, ("embedding.weight", 1, 1)),
        ("ZBVZeroBubble", 2, ("embedding.weight", 3, 0)),  # both copies on one rank
        ("ZBVZeroBubble", 1, ("embedding.weight", 1, 0)),
    ],
)
def test_a_tied_pair_is_declared_twice_where_two_stages_hold_it(schedule, pp, expected):
    config = make_config(
        model=TIED, mesh={"pp": pp}, pipeline={"schedule": schedule, "num_microbatches": 4}
    )
    declared = by_name(declared_of(config))
    assert declared["embedding.weight"].tied_to is None
    head = declared.get("head.weight")
    found = None if head is None else (head.tied_to, head.stage, head.pp_rank)
    assert found == expected


def test_units_of_every_grouping():
    def units(wrap: Any) -> dict[str, str]:
        config = make_config(mesh={"pp": 2}, pipeline={"schedule": "GPipe"}, fsdp={"wrap": wrap})
        declared = by_name(declared_of(config))
        names = ["embedding", "layers.0.ffn.up", "layers.1.ffn.up", "layers.2.ffn.up", "norm"]
        return {name: declared[f"{name}.weight"].unit for name in names}

    assert set(units("root").values()) == {ROOT_UNIT}
    assert units("blocks") == {
        "embedding": ROOT_UNIT,
        "layers.0.ffn.up": "layers.0",
        "layers.1.ffn.up": "layers.1",
        "layers.2.ffn.up": "layers.2",
        "norm": ROOT_UNIT,
    }
    assert units("first_block") == {
        "embedding": ROOT_UNIT,
        "layers.0.ffn.up": "layers.0",
        "layers.1.ffn.up": ROOT_UNIT,
        "layers.2.ffn.up": "layers.2",
        "norm": ROOT_UNIT,
    }
    # The first unit is on both stages: each makes its part of it.
    assert units([["embedding", "layers.1", "layers.2.ffn"], ["norm", "layers.3"]]) == {
        "embedding": "embedding+layers.1",
        "layers.0.ffn.up": ROOT_UNIT,
        "layers.1.ffn.up": "embedding+layers.1",
        "layers.2.ffn.up": "layers.2.ffn",
        "norm": "norm+layers.3",
    }


# The declaration against real tensors, collectives and gradients.


def observe(configs: list[RunConfig]) -> list[dict[str, Any]]:
    mesh = build_mesh(configs[0].mesh.degrees)
    seen = []
    for config in configs:
        program = build_program(config, numerics("float64", config), mesh=mesh)
        batch = program.shard(build_data(config).global_batch(0))
        alone = own_share(program, batch)
        program.step(batch)
        parameters = {}
        named: list[tuple[str, Any]] = list(program.named_parameters())
        for name, p in named:
            parameters[name] = {
                "placements": dict(
                    zip(p.device_mesh.mesh_dim_names, map(str, p.placements), strict=True)
                ),
                "mesh": p.device_mesh.mesh.flatten().tolist(),
                "shape": tuple(p.shape),
                "own": alone.get(name),
                "final": p.grad.full_tensor(),
            }
        seen.append({"parameters": parameters, "units": program.num_reductions})
    return seen


def own_share(program: Program, batch: LocalBatch) -> dict[str, torch.Tensor]:
    """Return each gradient before it is summed over ranks: from this rank's own tokens."""
    found: dict[str, torch.Tensor] = {}
    units = [m for stage in program.modules for m in stage.modules() if isinstance(m, FSDPModule)]
    states = [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]
    names = {id(p): name for name, p in program.named_parameters()}
    real = _PipelineStageBase.perform_reduce_grad

    def look(stage: Any, factor: int) -> Any:
        for group in states:
            for fsdp_param in group.fsdp_params:
                grad = fsdp_param.unsharded_accumulated_grad
                if grad is None:
                    unsharded = getattr(fsdp_param, "_unsharded_param", None)
                    grad = None if unsharded is None else unsharded.grad
                if grad is not None:
                    found[names[id(fsdp_param.sharded_param)]] = in_place(grad)
        return real(stage, factor)

    with mock.patch.object(_PipelineStageBase, "perform_reduce_grad", look):
        program.step(batch)
    for parameter in program.parameters():
        parameter.grad = None
    return found


def in_place(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient that tp has cut as a whole one, zero where other ranks hold it."""
    if not isinstance(grad, DTensor):
        return grad.clone()
    local = grad.to_local()
    [placement] = grad.placements
    if not isinstance(placement, Shard):
        return local.clone()
    whole = torch.zeros(grad.shape, dtype=grad.dtype)
    size = local.shape[placement.dim]
    at = grad.device_mesh.get_local_rank() * size
    whole.narrow(placement.dim, at, size).copy_(local)
    return whole


CASES: dict[str, list[dict[str, Any]]] = {
    "pp dp_shard cp": [
        {"pipeline": {"schedule": "GPipe"}},
        {"pipeline": {"schedule": "ZBVZeroBubble"}, "model": TIED, "fsdp": {"wrap": "first_block"}},
        {
            "pipeline": {"schedule": "1F1B"},
            "model": TIED,
            "fsdp": {"wrap": [["layers.1", "layers.2"], ["layers.3.ffn", "norm"]]},
        },
    ],
    "dp_replicate cp": [{"pipeline": {"schedule": "GPipe"}, "fsdp": {"wrap": "root"}}],
    "dp_replicate dp_shard": [{"pipeline": {"schedule": "LoopedBFS"}}],
    "pp dp_shard tp": [
        {"pipeline": {"schedule": "1F1B"}},
        {"pipeline": {"schedule": "GPipe"}, "model": parity.PANGU},
        {
            "pipeline": {"schedule": "GPipe"},
            "model": {**TIED, "num_kv_heads": 1},
            "tensor": {"sequence_parallel": False},
        },
    ],
    "dp_shard cp ep": [{"pipeline": {"schedule": "GPipe"}, "model": MOE}],
    "dp_shard tp ep": [
        {"pipeline": {"schedule": "GPipe"}, "model": MOE},
        {
            "pipeline": {"schedule": "1F1B"},
            "model": MOE,
            "tensor": {"sequence_parallel": False},
        },
    ],
}


def check_case(config: RunConfig, outcomes: list[dict[str, Any]]) -> None:
    degrees = config.mesh.degrees
    declared = by_name(declared_of(config))
    for rank, seen in enumerate(outcomes):
        where = degrees.coordinates(rank)
        mine = {name for name, p in declared.items() if p.pp_rank == where["pp"]}
        assert set(seen["parameters"]) == mine
        expected = {f"stage {declared[n].stage}: {declared[n].unit}" for n in mine}
        owning = {unit for unit, count in seen["units"].items() if count}
        assert owning == expected
        assert set(seen["units"].values()) <= {0, 1}
        for name in mine:
            check_tensor(declared[name], seen["parameters"][name], degrees, rank)
    for p in declared.values():
        check_sum(p, declared, degrees, outcomes)


def check_tensor(
    p: ParameterDeclaration, seen: dict[str, Any], degrees: Degrees, rank: int
) -> None:
    assert seen["shape"] == p.shape
    expected = {"fsdp": str(Shard(0))}
    assert all(p.placements.get(a, "shard(0)") == "shard(0)" for a in ("dp_shard", "cp"))
    if {"ep", "efsdp"} & p.placements.keys():  # ep cuts first, efsdp what it leaves
        expected = {"efsdp": f"_S({0}, {degrees.ep})", "ep": str(Shard(0))}
        assert "tp" not in p.placements
    if p.placements.get("dp_replicate") == "replicate":
        expected = {"dp_replicate": str(Replicate()), **expected}
    strided = None
    if "tp" in p.placements:
        at = {"shard(0)": Shard(0), "shard(1)": Shard(1)}.get(p.placements["tp"], Replicate())
        expected["tp"] = str(at)
        strided = f"_S({0}, {degrees.tp})" if at == Shard(0) else None  # what FSDP cuts once more
    assert seen["placements"] == expected | ({"fsdp": strided} if strided else {})
    assert (p.placements.get("pp") == "stage") is (degrees.pp > 1)
    # It lies on all ranks of its stage: those that agree with this one on pp.
    here = degrees.coordinates(rank)["pp"]
    assert seen["mesh"] == [
        r for r in range(degrees.world_size) if degrees.coordinates(r)["pp"] == here
    ]


def check_sum(
    p: ParameterDeclaration,
    declared: dict[str, ParameterDeclaration],
    degrees: Degrees,
    outcomes: list[dict[str, Any]],
) -> None:
    """The final gradient is the sum of ranks' own ones over the declared axes, and no others."""
    token_axes = [str(a) for a in (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP)]
    if {"ep", "efsdp"} & p.placements.keys():
        token_axes = [str(a) for a in (Axis.DP_REPLICATE, Axis.EFSDP)]
    over_tp = p.partial_over[-1:] == ("tp",)
    assert p.partial_over[: len(p.partial_over) - over_tp] == tuple(
        axis for axis in token_axes if degrees.degree(axis) > 1
    )
    # What no axis of tokens cuts is the same on the ranks of tp, unless it is declared partial.
    repeats = degrees.tp if p.placements.get("tp") == "replicate" and not over_tp else 1
    copies = [p.name, *([] if p.tied_to is None else [p.tied_to])]
    copies += [other.name for other in declared.values() if other.tied_to == p.name]
    total = torch.zeros(p.shape, dtype=torch.float64)
    shares = []
    for outcome in outcomes:
        for name in copies:
            if name in outcome["parameters"]:
                shares.append(outcome["parameters"][name]["own"])
                total += shares[-1] / repeats
    finals = [o["parameters"][p.name]["final"] for o in outcomes if p.name in o["parameters"]]
    for final in finals:
        assert float((final - total).norm() / total.norm()) <= GRAD_TOLERANCE, p.name
    # No share is the whole, else a gradient that is never summed would pass as well.
    assert min(float((share - total).norm() / total.norm()) for share in shares) > 1e-2


# The others are long.
DAILY = {"dp_replicate cp", "dp_shard cp ep"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "axes", [a if a in DAILY else pytest.param(a, marks=pytest.mark.long) for a in CASES]
)
def test_the_declaration_is_what_ranks_hold_and_sum(axes):
    configs = [
        make_config(
            mesh=dict.fromkeys(axes.split(), 2),
            batch={"global_batch": 16, "seq_len": 8},
            **{**case, "pipeline": {**case["pipeline"], "num_microbatches": 4}},
        )
        for case in CASES[axes]
    ]
    outcomes = run_on_ranks(observe, configs[0].mesh.degrees.world_size, configs, timeout=120)
    for number, config in enumerate(configs):
        check_case(config, [outcome[number] for outcome in outcomes])
