from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from paralign.align import compare
from paralign.align.trace import Kind, TensorEntry
from tests.align.judging import check_schema, judge, noisy, row
from tests.align.synthetic import toy_step, with_kind, write_trace


def test_a_missing_shard_is_inconclusive(tmp_path: Path) -> None:
    def shard(rank: int, entry: TensorEntry) -> bool:
        return rank == 2 and (entry.kind, entry.name) == ("grad", "layers.0.w")

    report = judge(tmp_path, [toy_step()], leave_out=shard)
    assert report.verdict == "inconclusive"
    assert report.coverage.skipped == [
        {"name": "layers.0.w", "why": "grad of step 0: 4 of 24 elements are missing (parallel run)"}
    ]
    assert report.coverage.compared == 2
    whole = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)
    assert whole.verdict == "aligned"
    assert whole.coverage.skipped == report.coverage.skipped


def test_a_missing_shard_does_not_hide_what_is_wrong(tmp_path: Path) -> None:
    step = toy_step()
    wrong = with_kind(step, Kind.GRAD, **{"embed.weight": 3 * step[Kind.GRAD, "embed.weight"]})
    report = judge(
        tmp_path, [wrong], leave_out=lambda rank, entry: rank == 2 and entry.name == "layers.0.w"
    )
    assert report.verdict == "misaligned"


def test_a_missing_replica_is_inconclusive(tmp_path: Path) -> None:
    def replica(rank: int, entry: TensorEntry) -> bool:
        return rank == 3 and (entry.kind, entry.name) == ("grad", "norm.weight")

    report = judge(tmp_path, [toy_step()], leave_out=replica)
    assert report.verdict == "inconclusive"
    assert "the replica on rank 3 is missing (replicated over dp, cp)" in report.why


def test_one_replica_that_differs_is_found_and_named(tmp_path: Path) -> None:
    def spoil(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        wrong = rank == 2 and (entry.kind, entry.name) == ("grad", "norm.weight")
        return local + 1e-9 if wrong else local

    report = judge(tmp_path, [toy_step()], change=spoil)
    assert report.verdict == "misaligned"
    assert row(report, "grad", "norm.weight").ranks_off == [2]
    (finding,) = report.findings
    assert (finding.cause, finding.evidence["ranks"]) == ("single_rank", [2])
    assert "Only what rank 2 holds is off" in finding.fix


def test_a_reference_whose_replicas_disagree_cannot_judge(tmp_path: Path) -> None:
    def spoil(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        return local * 2 if rank == 1 and entry.kind == Kind.GRAD else local

    write_trace(tmp_path / "ref", [toy_step()], mesh={"dp": 2}, change=spoil)
    write_trace(tmp_path / "par", [toy_step()])
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert report.verdict == "inconclusive"
    assert "the reference's own replicas of embed.weight differ" in report.why


def test_pending_sums_are_put_together(tmp_path: Path) -> None:
    step = toy_step()

    def summand(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        return local * (0.75 if rank == 0 else 0.25) if entry.partial_over else local

    def placements(name: str) -> Any:
        return (Partial(),) if name == "layers.0.w" else (Replicate(),)

    options: Any = {"mesh": {"tp": 2}, "placements": placements}
    assert judge(tmp_path, [step], change=summand, **options).verdict == "aligned"
    report = judge(
        tmp_path,
        [step],
        change=summand,
        leave_out=lambda rank, entry: rank == 1 and entry.name == "layers.0.w",
        **options,
    )
    assert "summands of rank 1 are missing" in report.why


def test_any_mesh_compares_with_any_other(tmp_path: Path) -> None:
    step = toy_step()
    layouts: dict[str, tuple[dict[str, int], Any]] = {
        "one": ({}, lambda name: ()),
        "fsdp": ({"fsdp": 4}, lambda name: (Shard(0),)),
        "fsdp x tp": (
            {"fsdp": 2, "tp": 2},
            lambda name: (
                (_StridedShard(0, split_factor=2), Shard(0))
                if name != "norm.weight"
                else (Shard(0), Replicate())
            ),
        ),
        "hsdp": (
            {"dp_replicate": 2, "dp_shard": 3},
            lambda name: (Replicate(), Shard(1 if name == "layers.0.w" else 0)),
        ),
    }
    for label, (mesh, placements) in layouts.items():
        write_trace(tmp_path / label, [noisy(step)], mesh=mesh, placements=placements)
    for reference in layouts:
        for parallel in layouts:
            report = compare(tmp_path / reference, tmp_path / parallel)
            assert report.verdict == "aligned", (reference, parallel, report.why)
            assert report.coverage.elements == 57
            assert row(report, "grad", "embed.weight").rel_l2 == 0.0


def test_tied_on_one_side_and_two_copies_on_the_other(tmp_path: Path) -> None:
    step = toy_step()
    tied = {key: value for key, value in step.items() if key[1] != "norm.weight"}
    copies = {
        **tied,
        **{(kind, "head.weight"): value for (kind, name), value in tied.items() if "embed" in name},
    }
    aliases = {"embed.weight": ("head.weight",)}
    write_trace(tmp_path / "ref", [tied], aliases=aliases)
    write_trace(tmp_path / "par", [copies])
    for reference, parallel in (("ref", "par"), ("par", "ref")):
        report = compare(tmp_path / reference, tmp_path / parallel)
        assert report.verdict == "aligned", report.why
        assert {r.name for r in report.tensors if r.kind == "grad"} == {
            "embed.weight",
            "head.weight",
            "layers.0.w",
        }
    wrong = {**copies, (Kind.GRAD, "head.weight"): 2 * copies[Kind.GRAD, "head.weight"]}
    write_trace(tmp_path / "par", [wrong])
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert [r.name for r in report.tensors if not r.ok] == ["head.weight"]


def test_names_and_kinds_that_only_one_side_has(tmp_path: Path) -> None:
    step = toy_step()
    fewer = {key: value for key, value in step.items() if key[1] != "norm.weight"}
    report = judge(tmp_path, [fewer])
    assert report.verdict == "inconclusive"
    assert {"name": "norm.weight", "why": "grad of step 0: not in the parallel run"} in (
        report.coverage.skipped
    )
    assert (report.coverage.parameters, report.coverage.compared) == (3, 2)
    report = judge(tmp_path, [step], [fewer])
    assert "not in the reference" in report.why
    no_moments = {key: value for key, value in step.items() if "moment" not in key[0]}
    report = judge(tmp_path, [no_moments])
    assert report.coverage.skipped == [
        {"name": "moment exp_avg of step 0", "why": "not recorded in the parallel run"}
    ]
    assert report.verdict == "inconclusive"


def test_other_shapes_are_not_compared(tmp_path: Path) -> None:
    step = toy_step()
    other = {
        key: torch.cat([2 * value, value[:1]]) if key[1] == "embed.weight" else value
        for key, value in step.items()
    }
    report = judge(tmp_path, [other])
    assert report.verdict == "inconclusive"
    assert "shape [8, 4] in the parallel run, [7, 4] in the reference" in report.why


def test_steps_that_only_one_side_has(tmp_path: Path) -> None:
    report = judge(tmp_path, [toy_step()], [toy_step(), toy_step(1)])
    assert report.verdict == "inconclusive"
    assert {"name": "step 1", "why": "recorded only in the reference"} in report.coverage.skipped


def test_nothing_in_common_is_not_aligned(tmp_path: Path) -> None:
    for name, what in (("ref", ("grads",)), ("par", ("params",))):
        kind = Kind.GRAD if name == "ref" else Kind.PARAM
        tensors = {key: value for key, value in toy_step().items() if key[0] == kind}
        write_trace(tmp_path / name, [tensors], what=what)
    report = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)
    assert report.verdict == "inconclusive"
    assert report.why.startswith("nothing was compared")
    check_schema(report)


def test_replicas_of_a_reference_may_differ_in_what_is_zero_in_theory(tmp_path: Path) -> None:
    def noise(rank: int, entry: TensorEntry, local: Tensor) -> Tensor:
        is_noise = (entry.kind, entry.name) == ("grad", "norm.weight")
        return 1e-18 * (rank + 1) * torch.ones_like(local) if is_noise else local

    write_trace(tmp_path / "ref", [toy_step()], mesh={"dp": 2}, change=noise)
    write_trace(tmp_path / "par", [toy_step()], change=noise)
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert report.verdict == "aligned", report.why
