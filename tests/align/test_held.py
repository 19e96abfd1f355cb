from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paralign.align import compare, record
from paralign.align.fused import Fused
from paralign.errors import ConfigError
from paralign.testing import run_on_ranks
from paralign.weights.initial import load_initial
from tests.align.shard_toys import (
    FUSED_NAMES,
    KV,
    SHARDS,
    Model,
    sharded_tensors,
    train,
    whole_tensors,
)

WHAT = ("params", "grads", "optimizer")


def record_whole(folder: Path) -> None:
    model = Model(whole_tensors())
    with record(folder, model, what=WHAT):
        train(model)


def record_shards(folder: str, way: str) -> None:
    """Record what a tp rank holds as plain tensors; the mesh is told in one of three ways."""
    rank = dist.get_rank()
    tensors = sharded_tensors(rank, 2)
    rules: dict[str, Any] = {"names": FUSED_NAMES, "shards": SHARDS}
    if way == "device mesh":
        rules["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    else:
        rules["mesh"] = {"tp": dist.group.WORLD if way == "groups" else (rank, 2)}
    if way == "heads not interleaved":
        fused = Fused({"*.wq": 2, "*.wk": 1, "*.wv": 1})
        rules["names"] = {**FUSED_NAMES, "*.wqkv": fused}
    if way == "swapped ranks":
        rules["mesh"] = {"tp": (1 - rank, 2)}
    model = Model(tensors)
    with record(folder, model, what=WHAT, **rules):
        train(model)


@pytest.mark.ranks
def test_plain_shards_are_put_where_they_belong(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    for way in ("device mesh", "groups", "index and size"):
        run_on_ranks(record_shards, 2, str(tmp_path / "tp"), way)
        report = compare(tmp_path / "one", tmp_path / "tp", allow_skipped=True)
        assert report.verdict == "aligned", (way, report.why)
        assert report.coverage.compared == report.coverage.parameters == 15
        assert not [item for item in report.coverage.skipped if item["name"] != "loss"]


@pytest.mark.ranks
def test_a_wrong_rule_is_not_aligned(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    for way in ("heads not interleaved", "swapped ranks"):
        run_on_ranks(record_shards, 2, str(tmp_path / "tp"), way)
        report = compare(tmp_path / "one", tmp_path / "tp", allow_skipped=True)
        assert report.verdict != "aligned", way
        assert "weights" in report.why, way
        assert all(row.ok for row in report.tensors if row.name == "layers.0.norm"), way


def record_shards_under_fsdp(source: str, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    at = mesh.get_coordinate()
    assert at is not None
    model = Model({name: torch.zeros_like(t) for name, t in sharded_tensors(at[1], 2).items()})
    fully_shard(model, mesh=mesh["dp"])
    rules: dict[str, Any] = {"names": FUSED_NAMES, "shards": SHARDS, "mesh": mesh}
    assert load_initial(model, source, **rules) == []
    with record(folder, model, what=WHAT, **rules):
        train(model)


@pytest.mark.ranks
def test_shards_that_fsdp_has_cut_once_more(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    run_on_ranks(record_shards_under_fsdp, 4, str(tmp_path / "one"), str(tmp_path / "par"))
    report = compare(tmp_path / "one", tmp_path / "par", allow_skipped=True)
    assert report.verdict == "aligned", report.why
    assert report.coverage.compared == report.coverage.parameters == 15


def load_and_record(source: str, folder: str) -> list[float]:
    rank = dist.get_rank()
    rules: dict[str, Any] = {"names": FUSED_NAMES, "shards": SHARDS, "mesh": {"tp": (rank, 2)}}
    model = Model({name: torch.zeros_like(t) for name, t in sharded_tensors(rank, 2).items()})
    unused = load_initial(model, source, **rules)
    assert unused == []
    expected = sharded_tensors(rank, 2)
    with record(folder, model, what=("params",), **rules):
        train(model)
    return [float((p - expected[n]).abs().max()) for n, p in Model(expected).named_parameters()]


@pytest.mark.ranks
def test_shards_are_loaded_from_a_run_on_one_device(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    run_on_ranks(load_and_record, 2, str(tmp_path / "one"), str(tmp_path / "tp"))
    report = compare(tmp_path / "one", tmp_path / "tp", allow_skipped=True)
    params = [row for row in report.tensors if row.kind == "param"]
    assert len(params) == 15
    assert all(row.ok and row.rel_l2 == 0.0 for row in params)
    # And back: one device starts from what the shards hold.
    model = Model({name: torch.zeros_like(t) for name, t in whole_tensors().items()})
    assert load_initial(model, tmp_path / "tp") == []
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole_tensors()[name])


def refuse(folder: str, case: str) -> str:
    rank = dist.get_rank()
    cases: dict[str, dict[str, Any]] = {
        "pattern": {"shards": {"*.no_such": {"tp": 0}}, "mesh": {"tp": (rank, 2)}},
        "place": {"mesh": {"tp": (0, 2)}},
        "half": {"mesh": {"dp": (0, 1), "tp": (rank, 3)}},
        "axis": {"shards": {"weight": {"tp": 0}}},
        "heads": {
            "names": {"weight": Fused({"q": KV, "k": 3}, groups=5)},
            "mesh": {"tp": (rank, 2)},
        },
    }
    try:
        with record(folder, nn.Linear(2, 2, bias=False), what=("params",), **cases[case]):
            pass
    except ConfigError as error:
        return str(error)
    return "recorded"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("pattern", "shards={'*.no_such': ...} matches no parameter on any rank"),
        ("place", "ranks 0 and 1 are both at tp=0"),
        ("half", "mesh['tp'] has size 3, but no rank is at 2"),
        ("axis", "'weight' is cut over 'tp', which is no axis of mesh= (not given)"),
        ("heads", "2 rows cannot be divided into 5 groups of parts with the shares [4, 3]"),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused_on_all(
    tmp_path: Path, case: str, message: str
) -> None:
    for said in run_on_ranks(refuse, 2, str(tmp_path / "t"), case):
        assert message in said


def test_layouts_say_it_in_full(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    model = Model(whole_tensors())
    with torch.no_grad():
        model.embed.copy_(whole_tensors()["embed"].flip(0))
    reversed_rows = [[row, row + 1, 10 - row, 11 - row] for row in range(11)]

    def layout(local: Tensor) -> dict[str, Any]:
        return {"shape": local.shape, "map": [reversed_rows, [[0, 5, 0, 5]]]}

    with record(tmp_path / "flipped", model, what=WHAT, layouts={"embed": layout}):
        train(model)
    report = compare(tmp_path / "one", tmp_path / "flipped", allow_skipped=True)
    assert report.verdict == "aligned", report.why
    short: dict[str, Any] = {"embed": {"shape": (11, 5), "map": [[[0, 10, 0, 10]], [[0, 5, 0, 5]]]}}
    with pytest.raises(ConfigError, match=r"local tensor of shape \(10, 5\), but 'embed' has"):
        record(tmp_path / "t", model, what=WHAT, layouts=short).start()
