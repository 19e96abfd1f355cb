from __future__ import annotations

from typing import Any

import pytest
import torch

from paralign.declaration import ParameterDeclaration, declare
from paralign.mesh import Degrees
from paralign.parallel.data import FSDP, Precision
from paralign.parallel.pipeline import Pipeline
from paralign.planning import resolve_plan
from paralign.prove.rows import Fate, Row, ranges, rows_of
from paralign.train.build import build_pieces
from tests import parity
from tests.parity import make_config


def declared(wrap: Any, *, tied: bool = False, **degrees: int) -> list[ParameterDeclaration]:
    model, blueprint = build_pieces(
        make_config(model={**parity.BASE["model"], "bias": False, "tie_embeddings": tied}),
        torch.float32,
    )
    fsdp, mesh = FSDP(wrap=wrap), Degrees(**degrees)
    plan = resolve_plan(
        model,
        mesh,
        blueprint,
        pipeline=Pipeline("GPipe"),
        fsdp=fsdp,
        precision=Precision(),
    )
    return declare(model, blueprint, degrees=mesh, plan=plan, fsdp=fsdp)


def about(rows: list[Row], part: str) -> list[tuple[str, str, str]]:
    return [(row.name, row.stages, row.unit) for row in rows if part in row.name]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3, 1, 2, 2], "1-3"), ([0, 2, 3, 7], "0,2-3,7"), ([5], "5"), ([], "")],
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_layers_alike_are_one_row():
    (rows,) = rows_of(declared("blocks", pp=2, dp_shard=2)).values()
    assert about(rows, ".wq.") == [("layers.*.attention.wq.weight", "0-1", "layers.*")]
    assert about(rows, "embedding") == [("embedding.weight", "0", "root")]
    assert [row.shape for row in rows if row.name == "head.weight"] == ["256x32"]
    assert len(rows) == 12


def test_layers_of_different_units_are_named():
    (rows,) = rows_of(declared("first_block", pp=2)).values()
    assert about(rows, ".wq.") == [
        ("layers.0,2.attention.wq.weight", "0-1", "layers.0,2"),
        ("layers.1,3.attention.wq.weight", "0-1", "root"),
    ]


def test_units_of_several_modules_keep_the_names_of_the_others():
    wrap = [["embedding", "layers.0"], ["layers.1.attention"], ["layers.2", "layers.3"]]
    (rows,) = rows_of(declared(wrap)).values()
    assert about(rows, ".wq.") == [
        ("layers.0.attention.wq.weight", "0", "embedding+layers.0"),
        ("layers.1.attention.wq.weight", "0", "layers.1.attention"),
        ("layers.2.attention.wq.weight", "0", "layers.2+layers.3"),
        ("layers.3.attention.wq.weight", "0", "layers.2+layers.3"),
    ]
    assert about(rows, "embedding") == [("embedding.weight", "0", "embedding+layers.0")]


def test_every_parameter_can_have_a_row_of_its_own():
    every = declared("blocks", pp=2)
    (rows,) = rows_of(every, verbose=True).values()
    assert [row.name for row in rows] == [p.name for p in every]
    assert about(rows, "layers.3.attention.wq") == [
        ("layers.3.attention.wq.weight", "1", "layers.3")
    ]


@pytest.mark.parametrize(
    ("degrees", "placement", "summed"),
    [
        ({}, "whole on the one rank", "whole on each rank"),
        ({"pp": 2}, "one stage of pp", "whole on each rank"),
        ({"cp": 2}, "shard(0) over cp", "summed over cp"),
        (
            {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2},
            "one stage of pp, shard(0) over dp_shard x cp, replicated over dp_replicate",
            "summed over dp_replicate x dp_shard x cp",
        ),
    ],
)
def test_the_fate_of_parameters_in_words(degrees, placement, summed):
    fate = Fate(placement=placement, summed=summed)
    assert list(rows_of(declared("blocks", **degrees))) == [fate]


def test_the_second_copy_of_a_tied_parameter_is_told_apart():
    first, second = rows_of(declared("blocks", tied=True, pp=2, cp=2)).items()
    assert first[0].summed == "summed over cp"
    assert second[0].summed == (
        "summed over cp, then added to that of embedding.weight on both stages"
    )
    assert [row.name for row in second[1]] == ["head.weight"]


def test_frozen_parameters_are_said_to_be_frozen():
    (one, *_) = declared("blocks")
    frozen = ParameterDeclaration(**{**vars(one), "trainable": False, "shape": ()})
    ((fate, (row,)),) = rows_of([frozen]).items()
    assert (fate.summed, row.shape) == ("none (frozen)", "scalar")
