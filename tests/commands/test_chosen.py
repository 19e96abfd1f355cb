from __future__ import annotations

from pathlib import Path

import pytest

from paralign.cli import main
from paralign.commands.chosen import load_run

RUN = """\
model: {name: llama, preset: 1b}
mesh: {pp: 8, dp_shard: 4, cp: 2}
pipeline: {schedule: GPipe, num_microbatches: 2}
batch: {global_batch: 64, seq_len: 4096}
"""


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text(RUN)
    return str(path)


def test_check_shows_what_was_shrunk_and_the_plan_of_the_copy(run_yaml, capsys):
    assert main(["check", run_yaml, "--shrink", "--world", "8"]) == 0
    out = capsys.readouterr().out
    assert "pp 8 -> 2, dp_shard 4 -> 2" in out
    assert "on 8 ranks: pp=2 dp_shard=2 cp=2" in out


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        ("check", ["--shrink", "--world", "11"], "--world=11 with --shrink"),
        ("align", ["--shrink", "--world", "128"], "Use --world 64"),
        ("align", ["--world", "8"], "world size 8 does not match the mesh"),
        ("drill", ["--world", "8"], "world size 8 does not match the mesh"),
        ("align", ["--shrink", "--world", "0"], "--world='0'"),
        ("check", ["--shrink", "--set", "mesh.pp=0"], "mesh.pp=0"),
    ],
)
def test_wrong_numbers_of_ranks_end_with_2_and_say_why(run_yaml, command, options, told, capsys):
    assert main([command, run_yaml, *options]) == 2
    assert told in capsys.readouterr().err


def test_torchrun_and_an_option_that_disagree(run_yaml, monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["check", run_yaml, "--world", "8"]) == 2
    assert "torchrun has started 4 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--shrink"]])
def test_a_notice_is_printed_once_beside_the_results(run_yaml, options, capsys):
    asked = ["--set", "mesh.tp=2", "--set", "tensor.overlap=mc2"]
    assert main(["check", run_yaml, *options, *asked]) == 0
    said = capsys.readouterr()
    assert said.err.count("notice: tensor.overlap=mc2 runs as chunks") == 1
    assert "the plan runs as asked, but for what the notice says" in said.out
    assert main(["check", run_yaml, *options, "--set", "tensor.overlap=chunks"]) == 0
    said = capsys.readouterr()
    assert "notice" not in said.err + said.out


@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
def test_one_rank_of_torchrun_prints_a_notice_and_none_when_quiet(
    run_yaml, rank, times, monkeypatch, capsys
):
    for name, value in {"RANK": rank, "WORLD_SIZE": 64, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    load_run(Path(run_yaml), ["tensor.overlap=mc2"])
    assert capsys.readouterr().err.count("notice:") == times
    load_run(Path(run_yaml), ["tensor.overlap=mc2"], quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.ranks
def test_a_small_copy_is_judged(run_yaml, capsys):
    assert main(["align", run_yaml, "--shrink", "--world", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("shrunk")
    assert "not kept" in out  # four ranks are too few for three axes
    assert "ALIGNED" in out
    assert main(["sweep", run_yaml, "--shrink", "--world", "1"]) == 0
    assert "1 aligned" in capsys.readouterr().out
