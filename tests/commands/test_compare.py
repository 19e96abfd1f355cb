from __future__ import annotations

import json

import torch

from paralign.cli import main
from tests.align.foreign import write_ranks
from tests.align.nets import build, train
from tests.align.synthetic import toy_step, write_trace


def test_noise_is_given_as_a_trace(tmp_path, capsys):
    low = {"compute_dtype": "float32"}
    step = toy_step(dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for name in ("ref", "noise", "par"):
        moved = {
            key: value
            if name == "ref" or key[0] == "param"
            else value * (1 + 1e-4 * torch.randn(value.shape, generator=generator))
            for key, value in step.items()
        }
        write_trace(tmp_path / name, [moved], facts=low)
    traces = [str(tmp_path / name) for name in ("ref", "par")]
    assert main(["compare", *traces, "-q"]) == 1
    report = tmp_path / "r.json"
    asked = ["--noise", str(tmp_path / "noise"), "-q", "--json", str(report)]
    assert main(["compare", *traces, *asked]) == 0
    assert json.loads(report.read_text())["yardstick"] == "noise"
    assert main(["compare", *traces, "--noise", str(tmp_path / "nowhere"), "-q"]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_names_that_content_does_not_tell_are_given(tmp_path, capsys):
    zeros = {"a.weight": torch.zeros(3, 2).double(), "b.weight": torch.zeros(3, 2).double()}
    other = {"x.weight": zeros["a.weight"], "y.weight": zeros["b.weight"]}
    grads = {"a.weight": torch.randn(3, 2).double(), "b.weight": torch.randn(3, 2).double()}
    write_ranks(tmp_path / "ref", [(zeros, grads)])
    swapped = {"x.weight": grads["b.weight"], "y.weight": grads["a.weight"]}
    write_ranks(tmp_path / "par", [(other, swapped)])
    command = ["compare", str(tmp_path / "ref"), str(tmp_path / "par"), "-q"]
    right = ["--rename", "x.*=b.*", "--rename", "y.weight=a.weight"]
    assert main([*command, *right]) == 0
    wrong = ["--rename", "x.*=a.*", "--rename", "y.weight=b.weight"]
    assert main([*command, *wrong]) == 1
    capsys.readouterr()
    assert main([*command, "--rename", "x", "--rename", "y=a", "--rename", "y=b"]) == 2
    told = capsys.readouterr().err
    assert "--rename 'x' is not OLD=NEW" in told
    assert "--rename gives 'y' two names: 'a' and 'b'" in told
    assert main([*command, "--rename", "z=a.weight"]) == 2
    assert "names['z'] matches no parameter" in capsys.readouterr().err


def test_the_model_of_one_device_isolates_what_is_wrong(tmp_path, capsys):
    broken = build()
    broken.norm.register_forward_hook(lambda module, args, out: out * 1.5)
    train(tmp_path / "ref", build())
    train(tmp_path / "par", broken)
    traces = [str(tmp_path / name) for name in ("ref", "par")]
    report = tmp_path / "r.json"
    asked = ["--model", "tests.align.nets:build", "--json", str(report)]
    assert main(["compare", *traces, *asked]) == 1
    first = json.loads(report.read_text())["located"]["isolated"][0]
    assert (first["kind"], first["name"], first["class"]) == ("output", "norm", "LayerNorm")
    capsys.readouterr()
    assert main(["compare", *traces, "--model", "tests.align.nets:nothing"]) == 2
    assert "has no 'nothing'" in capsys.readouterr().err
