from __future__ import annotations

from pathlib import Path

import pytest

from paralign.cli import main
from paralign.config.load import load_config
from paralign.config.presets import PRESETS


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_writes_the_default_and_says_what_is_next(capsys):
    assert main(["init"]) == 0
    assert capsys.readouterr().out == "wrote RUN.yaml; next: paralign align RUN.yaml\n"
    assert load_config("RUN.yaml") == PRESETS["pp_fsdp_cp"]()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_breaks_no_rule(preset):
    assert main(["init", preset, "-o", "x.yaml"]) == 0
    assert load_config("x.yaml") == PRESETS[preset]()


def test_a_file_that_is_there_is_kept_unless_forced(capsys):
    Path("RUN.yaml").write_text("mine\n")
    assert main(["init"]) == 2
    assert capsys.readouterr().err == (
        "error: --output='RUN.yaml' exists already. Use --force to replace it, or give another "
        "--output.\n"
    )
    assert Path("RUN.yaml").read_text() == "mine\n"
    assert main(["init", "--force"]) == 0
    assert load_config("RUN.yaml")


def test_unknown_preset(capsys):
    assert main(["init", "zero_buble"]) == 2
    assert "Did you mean zero_bubble?" in capsys.readouterr().err
    assert not Path("RUN.yaml").exists()


def test_no_folder_to_write_into(capsys):
    assert main(["init", "-o", "no/such/RUN.yaml"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_preset_that_does_not_fit_the_ranks_is_refused_with_meshes_that_do(capsys):
    assert main(["init", "pangu_moe_8", "--world", "8", "-o", "x.yaml"]) == 0
    assert main(["init", "pangu_moe_8", "--world", "4"]) == 2
    said = capsys.readouterr().err
    assert "world size 4 does not match the mesh: pp=1 * dp_replicate=1 * dp_shard=4" in said
    assert "These fit: {dp_shard: 2, tp: 2, ep: 4}, " in said
    assert not Path("RUN.yaml").exists()
    assert main(["init", "pangu_moe_1", "--world", "7"]) == 2
    assert "None was found that fits." in capsys.readouterr().err
