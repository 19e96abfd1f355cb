from __future__ import annotations

import json
from pathlib import Path

import pytest

from paralign.cli import main
from tests.commands.test_sweep_cases import check_schema

SMALL = """\
model: {name: llama, preset: tiny, num_layers: 2}
mesh: {pp: 2}
pipeline: {schedule: GPipe, num_microbatches: 2}
batch: {global_batch: 2, seq_len: 16}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> str:
    path = tmp_path / "RUN.yaml"
    path.write_text(SMALL)
    return str(path)


@pytest.mark.ranks
def test_aligned_run_is_reported_written_and_kept(run_yaml, tmp_path, capsys):
    traces, report = tmp_path / "traces", tmp_path / "r.json"
    junit, page = tmp_path / "r.xml", tmp_path / "r.html"
    options = ["--steps", "2", "--json", str(report), "--trace", str(traces)]
    options += ["--junit", str(junit), "--report", str(page)]
    assert main(["align", run_yaml, *options]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("ALIGNED")
    assert err == ""
    written = json.loads(report.read_text())
    assert written["verdict"] == "aligned"
    assert written["config"]["align"]["steps"] == 2
    assert {row["step"] for row in written["tensors"]} == {0, 1}
    check_schema("report", report.read_text())
    assert 'tests="1" failures="0" errors="0"' in junit.read_text()
    assert "<title>aligned: pp2, float64</title>" in page.read_text()

    # What was kept can be compared again, also with one side missing.
    reference, parallel = str(traces / "reference"), str(traces / "parallel")
    assert main(["compare", reference, parallel, "-q"]) == 0
    assert capsys.readouterr().out.startswith("aligned: ")
    assert main(["compare", reference, str(traces / "nowhere")]) == 2
    assert str(traces / "nowhere") in capsys.readouterr().err


@pytest.mark.ranks
@pytest.mark.long
def test_the_tensor_parallel_example_is_aligned(capsys):
    example = Path(__file__).parents[2] / "examples" / "tp.yaml"
    assert main(["align", str(example)]) == 0
    assert capsys.readouterr().out.startswith("ALIGNED")


@pytest.mark.ranks
def test_quiet_says_the_verdict_and_verbose_every_tensor(run_yaml, capsys):
    assert main(["align", run_yaml, "-q"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert main(["align", run_yaml, "-v"]) == 0
    out = capsys.readouterr().out
    for layer in (0, 1):
        for name in ("attention.wq", "attention.wo", "ffn.down"):
            assert f"layers.{layer}.{name}.weight" in out


@pytest.mark.ranks
def test_dtype_option_is_the_dtype_that_is_compared(run_yaml, tmp_path):
    report = tmp_path / "r.json"
    assert main(["align", run_yaml, "--dtype", "float32", "--json", str(report), "-q"]) == 0
    assert json.loads(report.read_text())["dtype"] == "float32"
