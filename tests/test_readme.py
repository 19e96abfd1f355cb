"""The README's code runs, and its commands are those that .ci/run executes."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paralign.align import compare

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_two_commands_do_all_of_their_set_up():
    main_job, tests = [block.strip() for block in blocks("console")[:2]]
    assert main_job == (
        "pip install -c constraints.txt . && paralign align examples/pp_fsdp_cp.yaml"
    )
    assert tests == "pip install -c constraints.txt -e '.[dev]' && pytest"


def test_ci_runs_the_readme_commands():
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    for block in blocks("console")[:2]:
        install, command = block.strip().split(" && ")
        assert command in ci
        # The main job's plain install is contained in the tests' editable one with its extra.
        assert install.startswith("pip install -c constraints.txt ")
    assert any(line.endswith("-c constraints.txt -e '.[dev]'") for line in ci)


@pytest.mark.ranks
def test_the_python_example_trains(tmp_path):
    example, _ = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in run.stdout.strip(" []\n").split(",")]
    assert len(losses) == 8
    assert len(set(losses)) == 1  # the same global loss on every rank
    assert abs(losses[0] - math.log(256)) < 0.2  # random bytes, untrained: log of the vocabulary


def test_the_recording_example_records(tmp_path, monkeypatch):
    _, example = blocks("python")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(2, 3, dtype=torch.float64)).mean()
    loss.backward()
    run = {"model": model, "mesh": None, "optimizer": optimizer, "loss": loss, "num_tokens": 2}
    exec(example, run)  # the README's own text
    optimizer.step()  # ends the step, and with it the recording
    report = compare(tmp_path / "trace" / "parallel", tmp_path / "trace" / "parallel")
    assert report.verdict == "aligned"
    assert report.loss is not None
