from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paralign.cli import main
from paralign.config.load import load_config, resolve_config
from paralign.errors import ConfigError
from tests.config.wrong import GOOD, Wrong
from tests.config.wrong_keys import FILES, KEYS
from tests.config.wrong_plans import PLANS, SIZES
from tests.config.wrong_values import VALUES

WRONG = [*SIZES, *PLANS, *KEYS, *VALUES, *FILES]

# Runs `main` on each list of arguments in argv[1]; prints the statuses and whether torch came in.
_MANY = """
import json, sys
from paralign.cli import main
print(json.dumps([main(argv) for argv in json.loads(sys.argv[1])] + ["torch" in sys.modules]))
"""


def argv_of(wrong: Wrong, folder: Path) -> list[str]:
    path = folder / "RUN.yaml"
    path.write_text(wrong.text)
    sets = [text for override in wrong.sets for text in ("--set", override)]
    return ["check", str(path), *sets, *wrong.options]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.id)
def test_wrong_config_is_one_paragraph_with_value_rule_and_fix(wrong, tmp_path, capsys):
    assert main(argv_of(wrong, tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.endswith("\n")
    assert err.count("\n") == 1, "a single mistake is a single line"
    assert wrong.value in err
    assert wrong.rule in err
    assert wrong.fix in err
    assert "Traceback" not in err


def test_the_table_is_large_and_its_base_is_sound(tmp_path):
    assert len(WRONG) >= 30
    assert len({wrong.id for wrong in WRONG}) == len(WRONG)
    (tmp_path / "RUN.yaml").write_text(GOOD)
    assert load_config(tmp_path / "RUN.yaml").mesh.degrees.world_size == 8


def test_wrong_configs_import_no_torch(tmp_path):
    calls = []
    for wrong in WRONG:
        (tmp_path / wrong.id).mkdir()
        calls.append(argv_of(wrong, tmp_path / wrong.id))
    assert run_python(_MANY, json.dumps(calls)) == [*[2] * len(WRONG), False]


def test_the_test_for_torch_can_fail():
    assert run_python("import torch\n" + _MANY, "[]") == [True]


def run_python(script: str, argument: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", script, argument], capture_output=True, text=True, check=True
    )
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["text_for_number", "heads_against_cp", "yaml_syntax"])
def test_a_wrong_config_is_refused_within_three_seconds(name, tmp_path):
    wrong = next(wrong for wrong in WRONG if wrong.id == name)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paralign", *argv_of(wrong, tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - begin < 3
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and wrong.fix in done.stderr


def test_all_mistakes_are_listed_at_once(tmp_path, capsys):
    path = tmp_path / "RUN.yaml"
    path.write_text("""\
model: {name: llama, preset: tiny, num_head: 4}
mesh: {pp: two, dp_shard: 3, ep: 5}
pipeline: {schedule: GPipe, num_microbatches: 4, layers: 2}
batch: {global_batch: 8, seq_len: 64}
optimizer: {lr: .nan}
data: {source: /no/such/text}
""")
    assert main(["check", str(path)]) == 2
    title, *bullets = capsys.readouterr().err.splitlines()
    assert title == f"error: {path}:"
    assert [bullet.removeprefix("  - ").split(" ")[0] for bullet in bullets] == [
        "mesh.pp='two'",
        "pipeline.layers:",
        "optimizer.lr=nan",
        "model.num_head:",
        "mesh.ep=5",
        "batch.global_batch=8",
        "data.source='/no/such/text':",
    ]


def test_a_rule_is_not_asked_about_a_value_that_could_not_be_read():
    with pytest.raises(ConfigError) as caught:
        resolve_config({"model": {"name": "llama"}, "batch": {"global_batch": "eight"}})
    assert "does not divide" not in str(caught.value)


def test_missing_file_says_how_to_get_one(tmp_path, capsys):
    path = tmp_path / "none.yaml"
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: there is no such file. `paralign init` writes a RUN.yaml to start from.\n"
    )


def test_a_folder_is_no_config(tmp_path, capsys):
    assert main(["check", str(tmp_path)]) == 2
    assert "cannot be read: is a directory" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path, capsys):
    path = tmp_path / "RUN.yaml"
    path.write_text(GOOD)
    path.chmod(0)
    assert main(["check", str(path)]) == 2
    assert "permission denied" in capsys.readouterr().err


def test_binary_file_is_no_config(tmp_path, capsys):
    path = tmp_path / "RUN.yaml"
    path.write_bytes(b"mesh: \xff\xfe")
    assert main(["check", str(path)]) == 2
    assert "byte 6 is not UTF-8 text" in capsys.readouterr().err


def test_data_that_is_too_short_empty_or_unreadable(tmp_path):
    short, empty, folder = tmp_path / "short.txt", tmp_path / "empty.txt", tmp_path / "folder"
    short.write_text("abc" * 30)
    empty.write_text("")
    folder.mkdir()
    raw = {"model": {"name": "llama"}, "batch": {"global_batch": 8, "seq_len": 64}}
    for path, reason in (
        (short, "holds 90 bytes in 1 file, which makes 2 rows of seq_len=64, fewer than"),
        (empty, "is empty"),
        (folder, "holds no file"),
        (Path("/dev/null"), "is neither a file nor a folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve_config({**raw, "data": {"source": str(path)}})
        assert f"data.source={str(path)!r}" in str(caught.value)
        assert reason in str(caught.value)
        assert "Give a" in str(caught.value)


def test_size_one_everything_is_legal():
    config = resolve_config({"model": {"name": "llama"}, "pipeline": {"num_microbatches": 1}})
    assert config.mesh.degrees.world_size == 1


def test_null_program_and_empty_sections_are_fine():
    config = resolve_config({"model": {"name": "llama"}, "program": None, "mesh": None})
    assert config.mesh.pp == 1
