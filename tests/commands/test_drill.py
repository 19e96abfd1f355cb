from __future__ import annotations

import pytest

from paralign.cli import main

CONFIG = "model: {name: llama, preset: tiny}\nmesh: {cp: 2}\n"


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text(CONFIG)
    return str(path)


def test_list_says_what_there_is_and_what_the_config_lacks(run_yaml, capsys):
    assert main(["drill", run_yaml, "--list"]) == 0
    out = capsys.readouterr().out
    assert "cp_is_left_out_of_the_fsdp_mesh" in out
    assert "needs pp" in out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--only", "no_such"], "--only='no_such'"),
        (["--only", "each_stage_clips"], "lacks pp"),
        (["--faults", "nowhere.py"], "--faults='nowhere.py'"),
        (["--timeout", "never"], "--timeout='never'"),
        (["-q", "-v"], "contradict"),
        (["--set", "mesh.cp=0"], "mesh.cp=0"),
    ],
)
def test_wrong_arguments_end_with_2_and_say_why(run_yaml, options, told, capsys):
    assert main(["drill", run_yaml, *options]) == 2
    assert told in capsys.readouterr().err


def test_under_torchrun_it_is_refused(run_yaml, monkeypatch, capsys):
    rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["drill", run_yaml]) == 2
    assert "without torchrun" in capsys.readouterr().err
