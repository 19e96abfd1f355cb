from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from paralign.cli import main
from tests.train.test_published import checkpoint
from tests.weights.published import deepseek, mixtral


def test_export_writes_a_published_model(tmp_path: Path, capsys) -> None:
    checkpoint(tmp_path / "run", mixtral())
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), str(out), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"wrote {out}: MixtralForCausalLM, step 7, 41 tensors, bfloat16" in said
    assert json.loads((out / "config.json").read_text())["model_type"] == "mixtral"
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "quiet"), "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_mistakes_are_one_paragraph_and_exit_2(tmp_path: Path, capsys) -> None:
    checkpoint(tmp_path / "run", deepseek(norm_eps=1e-3, bias=True))
    argv = ["export", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "the published form cannot say what this pangu_moe computes:" in said
    assert "norm_eps=0.001: deepseek_v3 takes 1e-06 for the norms of the latents" in said
    assert "bias=true: queries, feed-forwards and the head have biases" in said
    assert "Traceback" not in said
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert "there is no such folder or file" in capsys.readouterr().err
    assert main([*argv, "--dtype", "int8"]) == 2
    assert "'int8' is not one of" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "run"), str(tmp_path)]) == 2
    assert "exists already. Give the name of a new folder." in capsys.readouterr().err
