from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench._process import Cost
from bench.align_start import EXAMPLE, commands, report

ROOT = Path(__file__).resolve().parents[2]


def cost(seconds: float) -> Cost:
    return Cost(seconds=seconds, cpu_seconds=2 * seconds)


def test_the_report_gives_the_median_of_the_ratios(capsys):
    rounds = [
        {"align": cost(6), "torchrun": cost(10)},
        {"align": cost(4), "torchrun": cost(10)},
        {"align": cost(50), "torchrun": cost(100)},
    ]
    assert report(rounds) == 0.5
    assert "0.500    ratio 0.500   (target 0.50)" in capsys.readouterr().out


@pytest.mark.long
def test_torchrun_runs_the_parallel_part(tmp_path):
    small = tmp_path / "run.yaml"
    small.write_text((ROOT / EXAMPLE).read_text().replace("pp: 2, dp_shard: 2, cp: 2", "cp: 2"))
    command = commands(small, 2, tmp_path / "trace")["torchrun"]
    assert command[0] == sys.executable
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    assert len(list((tmp_path / "trace").glob("rank*.safetensors"))) > 0
