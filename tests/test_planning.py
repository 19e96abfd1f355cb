from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paralign.blueprint import Blueprint
from paralign.errors import ScheduleError
from paralign.mesh import Degrees
from paralign.parallel.data import FSDP, Precision
from paralign.parallel.pipeline import Pipeline
from paralign.parallel.support import Plan
from paralign.planning import resolve_plan, stage_of_parameters
from paralign.train.build import build_pieces
from tests import parity
from tests.parity import make_config


def pieces(**model: Any) -> tuple[nn.Module, Blueprint]:
    return build_pieces(make_config(model={**parity.BASE["model"], **model}), torch.float32)


def resolve(degrees: Degrees, pipeline: Pipeline, **rest: Any) -> Plan:
    model, blueprint = pieces()
    settings = {"fsdp": FSDP(), "precision": Precision(), **rest}
    return resolve_plan(model, degrees, blueprint, pipeline=pipeline, **settings)


def test_a_plan_is_resolved_from_the_model_and_the_table():
    plan = resolve(
        Degrees(pp=2, dp_shard=2),
        Pipeline("zbvzerobubble", num_microbatches=4),
        precision=Precision(compute=torch.bfloat16, reduce=torch.bfloat16),
    )
    assert plan.num_layers == 4
    assert plan.num_stages == 4
    assert plan.reshard_after_forward is False  # repaired
    assert (plan.compute_dtype, plan.reduce_dtype) == ("bfloat16", "bfloat16")


def test_dtypes_of_a_plan_default_to_the_models_own():
    plan = resolve(Degrees(), Pipeline("GPipe"))
    assert (plan.compute_dtype, plan.reduce_dtype) == ("float32", "float32")


def test_a_refused_plan_names_the_mesh_and_lists_every_reason():
    with pytest.raises(ScheduleError) as caught:
        resolve(
            Degrees(pp=4),
            Pipeline("ZBVZeroBubble", num_microbatches=2),
            fsdp=FSDP(reshard_after_forward=True),
        )
    title, *bullets = str(caught.value).split("\n  - ")
    assert title == ("the plan is refused on pp=4 dp_replicate=1 dp_shard=1 cp=1 tp=1 ep=1:")
    assert [b.split(" ")[0] for b in bullets] == ["num_layers=4", "reshard_after_forward=true:"]


def test_every_parameter_has_the_stage_of_its_piece():
    model, blueprint = pieces(tie_embeddings=True, num_layers=5)
    plan = Plan(schedule="LoopedBFS", pp=2, num_layers=5)
    owners = stage_of_parameters(model, blueprint, plan)
    assert set(owners) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    by_piece: dict[str, set[int]] = {}
    for name, stage in owners.items():
        piece = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
        by_piece.setdefault(piece, set()).add(stage)
    assert by_piece == {
        "embedding": {0},
        "layers.0": {0},
        "layers.1": {0},
        "layers.2": {1},
        "layers.3": {2},
        "layers.4": {3},
        "norm": {3},
        "head": {3},
    }
