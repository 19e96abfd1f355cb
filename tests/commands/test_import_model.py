from __future__ import annotations

import json
from pathlib import Path

import pytest

from paralign.cli import main
from paralign.config.load import load_config
from tests.weights.published import build, deepseek, dense, write


def test_import_writes_a_seed_and_a_run_that_starts_from_it(tmp_path: Path, capsys) -> None:
    family = deepseek(vocab_size=256)
    write(tmp_path / "m", family, build(family))
    out = tmp_path / "out"
    assert main(["import", str(tmp_path / "m"), str(out)]) == 0
    assert f"next: paralign check {out / 'RUN.yaml'}" in capsys.readouterr().out.replace("\n", " ")
    assert sorted(path.name for path in out.iterdir()) == ["RUN.yaml", "step-00000000"]
    config = load_config(out / "RUN.yaml")  # keeps every rule, that of start_from too
    assert config.model.start_from == str(out)
    assert config.model.hyper_parameters == vars(family[1])
    assert main(["check", str(out / "RUN.yaml")]) == 0


@pytest.mark.ranks
def test_a_run_that_was_imported_is_aligned(tmp_path: Path, capsys) -> None:
    family = dense(vocab_size=256)
    write(tmp_path / "m", family, build(family))
    out = tmp_path / "out"
    assert main(["import", str(tmp_path / "m"), str(out), "-q"]) == 0
    small = ["--set", "batch={global_batch: 8, seq_len: 16}", "--set", "mesh={tp: 2}"]
    assert main(["align", str(out / "RUN.yaml"), *small]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ALIGNED")
    # The loss of these weights, not of fresh ones, which would be the logarithm of 256.
    loss = float(said.split("loss ")[1].split()[0])
    assert abs(loss - 5.545) > 0.3


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys) -> None:
    family = dense()
    folder = write(tmp_path / "m", family, build(family), sliding_window=7, hidden_act="gelu")
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "is of a model that paralign cannot compute:" in said
    assert "hidden_act='gelu'" in said
    assert "sliding_window=7 is not known" in said
    raw = json.loads((folder / "config.json").read_text())
    del raw["sliding_window"]
    raw |= {"hidden_act": "silu", "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(raw))
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "does not have the tensors that its config.json asks for:" in said
    assert "model.layers.2.mlp.down_proj.weight is missing" in said
    assert not (tmp_path / "out").exists()
