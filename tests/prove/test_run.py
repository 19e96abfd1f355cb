"""``align`` end to end: traces, verdict, dtypes, a user's own model, torchrun, failing ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paralign.config.load import load_config
from paralign.errors import ScheduleError
from paralign.prove.run import align, check_plan, dtype_of
from tests.parity import make_config

ROOT = Path(__file__).parents[2]


def test_the_dtype_is_float64_where_the_device_has_it():
    assert dtype_of(make_config(align={"dtype": None})) == "float64"
    assert dtype_of(make_config(align={"dtype": "bfloat16"})) == "bfloat16"


def test_a_plan_is_judged_in_the_dtype_that_is_compared():
    config = make_config(pipeline={"schedule": "ZBVZeroBubble"}, mesh={"pp": 2})
    check_plan(config, "float64")
    with pytest.raises(ScheduleError, match="compute=bfloat16, below reduce=float32"):
        check_plan(config, "bfloat16")


@pytest.mark.ranks
@pytest.mark.parametrize(
    "example",
    [
        "hsdp",
        pytest.param("zero_bubble", marks=pytest.mark.long),
        pytest.param("pp_fsdp_cp", marks=pytest.mark.long),  # is .ci/run's last step
        pytest.param("pangu_dense", marks=pytest.mark.long),
        pytest.param("pangu_moe_pp_fsdp_cp", marks=pytest.mark.long),
    ],
)
def test_the_examples_are_aligned(example):
    report = align(load_config(ROOT / "examples" / f"{example}.yaml", ()))
    assert report.verdict == "aligned", report.why
    assert report.coverage.is_full
    assert max(row.eps for row in report.tensors if row.kind == "grad" and row.step == 0) < 100
    assert {"reference_s", "parallel_s", "compare_s"} <= set(report.timings)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "example",
    [
        "pangu_moe_pp_fsdp",
        pytest.param("pangu_moe_8", marks=pytest.mark.long),
        pytest.param("pangu_moe_4", marks=pytest.mark.long),
        pytest.param("pangu_moe_1", marks=pytest.mark.long),
    ],
)
def test_presets_of_the_report_are_aligned(example):
    report = align(load_config(ROOT / "examples" / f"{example}.yaml", ["align.steps=2"]))
    assert report.verdict == "aligned", report.why
    assert report.coverage.is_full
    assert max(row.eps for row in report.tensors if row.kind == "grad" and row.step == 0) < 100


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_lower_precision_is_judged_by_the_float64_truth(dtype, tmp_path):
    config = make_config(mesh={"pp": 2, "dp_shard": 2, "cp": 2}, align={"dtype": dtype, "steps": 2})
    report = align(config, trace=tmp_path)
    assert report.verdict == "aligned", report.why
    assert report.dtype == dtype
    assert sorted(p.name for p in tmp_path.iterdir()) == ["parallel", "reference", "truth"]
    # Not vacuous: the run is as far from float64 as its dtype is coarse.
    assert max(row.rel_l2 for row in report.tensors if row.kind == "grad") > 1e-8


@pytest.mark.ranks
def test_tied_copies_on_two_stages_are_both_compared(tmp_path):
    config = make_config(mesh={"pp": 2, "dp_shard": 2}, model={"tie_embeddings": True})
    report = align(config, trace=tmp_path)
    assert report.verdict == "aligned", report.why
    indices = [json.loads((tmp_path / "parallel" / f"rank{r:05}.json").read_text()) for r in (0, 3)]
    for index in indices:
        assert "embedding.weight" in json.dumps(index)


@pytest.mark.ranks
@pytest.mark.long
def test_own_model_of_the_examples_is_aligned(monkeypatch):
    monkeypatch.chdir(ROOT)
    report = align(load_config("examples/own_model.yaml", ()))
    assert report.verdict == "aligned", report.why


@pytest.mark.ranks
def test_under_torchrun_the_world_is_joined_and_every_rank_exits_alike(tmp_path):
    config = ROOT / "examples" / "pp_fsdp_cp.yaml"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"),
            *(
                "-m",
                "paralign",
                "align",
                str(config),
                "--set",
                "mesh.pp=1",
                "--set",
                "mesh.dp_shard=1",
            ),
            *("--json", str(tmp_path / "report.json")),
        ],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "aligned"
    assert result.stdout.count("ALIGNED") == 1
