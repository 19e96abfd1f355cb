from __future__ import annotations

from pathlib import Path

import pytest

from paralign.cli import main
from tests.config.wrong import GOOD


@pytest.fixture
def run_yaml(tmp_path):
    path = tmp_path / "RUN.yaml"
    path.write_text(GOOD)
    return str(path)


def test_shows_support_cost_and_declared_reductions(run_yaml, capsys):
    assert main(["check", run_yaml]) == 0
    out = capsys.readouterr().out
    for text in (
        "the plan runs as asked",
        "memory per rank",
        "communication per rank and step",
        "reduce-scatter",
        "embedding.weight",
        "layers.*.attention.wq.weight",
        "dp_shard x cp",
    ):
        assert text in out


def test_verbose_lists_every_parameter(run_yaml, capsys):
    assert main(["check", run_yaml, "-v"]) == 0
    assert "layers.3.attention.wq.weight" in capsys.readouterr().out


def test_a_repair_is_shown(run_yaml, capsys):
    schedule = "pipeline={schedule: ZBVZeroBubble, num_microbatches: 4}"
    assert main(["check", run_yaml, "--set", schedule]) == 0
    assert "repair" in capsys.readouterr().out


def test_a_unit_that_is_no_module_is_the_users_mistake(run_yaml, capsys):
    assert main(["check", run_yaml, "--set", "fsdp.wrap=[[layers.9]]"]) == 2
    assert "layers.9" in capsys.readouterr().err


@pytest.mark.parametrize("world", ["8"])
def test_a_world_that_fits(run_yaml, world, capsys):
    assert main(["check", run_yaml, "--world", world]) == 0
    assert "on 8 ranks" in capsys.readouterr().out


def test_the_full_size_on_512_devices_is_checked(capsys):
    assert main(["check", str(Path(__file__).parents[2] / "examples" / "pangu_moe_full.yaml")]) == 0
    out = capsys.readouterr().out
    for text in ("on 512 ranks", "35.5 B parameters (3.96 B active per token)", "optimizer"):
        assert text in out
    for heading in ("activations", "communication by axis", "efsdp"):
        assert heading in out
