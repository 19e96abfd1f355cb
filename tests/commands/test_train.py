from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from paralign.cli import main

RUN = {
    "model": {"name": "llama", "preset": "tiny"},
    "mesh": {"dp_shard": 2},
    "pipeline": {"num_microbatches": 2},
    "batch": {"global_batch": 8, "seq_len": 16},
}


def write(tmp_path, **train) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN | {"train": {"dir": str(tmp_path / "run"), **train}}))
    return str(path)


@pytest.mark.ranks
def test_train_trains_and_goes_on(tmp_path, capsys):
    path = write(tmp_path, steps=4, log_every=2)
    assert main(["train", path]) == 0
    first = capsys.readouterr().out
    assert "step 2/4: loss" in first
    assert "tokens/s" in first
    assert main(["train", path, "--set", "train.steps=6", "--set", "mesh={cp: 2}"]) == 0
    again = capsys.readouterr().out
    assert "going on from" in again
    assert "step 6/6: loss" in again
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]


@pytest.mark.ranks
def test_train_joins_torchrun(tmp_path):
    path = write(tmp_path, steps=2, log_every=1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "paralign", "train", path],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2: loss") == 1  # one rank speaks


def test_what_only_training_needs_is_checked_at_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    path = write(tmp_path)
    status = main(["train", path, "--set", f"train.dir={tmp_path / 'file' / 'run'}"])
    assert status == 2
    error = capsys.readouterr().err
    assert "train.dir=" in error
    assert "cannot be written" in error
    program = ["--set", "program=examples.own_program:build"]
    assert main(["train", path, *program]) == 2
    assert "Train it with its own loop, or remove `program`" in capsys.readouterr().err


@pytest.mark.ranks
def test_a_seed_checkpoint_is_written_and_started_from(tmp_path, capsys):
    path, seed = write(tmp_path, steps=1), tmp_path / "seed"
    assert main(["train", path, "--seed-checkpoint", str(seed)]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert f"wrote {seed / 'step-00000000'}; start from it with model.start_from={seed}" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    start = ["--set", f"model.start_from={seed}", "--set", "mesh={pp: 2}"]
    assert main(["train", path, *start]) == 0
    assert f"starting from {seed}" in capsys.readouterr().out.replace("\n", "")
    assert main(["train", path, "--seed-checkpoint", str(seed)]) == 2
    assert "exists already. Give the name of a new folder" in capsys.readouterr().err
