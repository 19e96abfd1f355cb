from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.align import compare
from paralign.align.locate import first_divergence
from paralign.align.verdict import TensorRow
from paralign.errors import ConfigError
from tests.align.judging import check_schema
from tests.align.nets import Net, build, train


def scale_output(name: str, factor: float) -> Net:
    """Return the model with a part whose output, and so its gradient inside, is off."""
    model = build()
    model.get_submodule(name).register_forward_hook(lambda module, args, out: out * factor)
    return model


def isolated(tmp_path: Path, model: nn.Module | None = None, **options: Any) -> list[str]:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", model or build(), **options)
    report = compare(tmp_path / "ref", tmp_path / "par", model=build)
    check_schema(report)
    assert report.verdict == "misaligned", report.why
    assert report.located is not None
    return [f"{item['kind']} {item['name']}" for item in report.located["isolated"]]


class Backwards(torch.autograd.Function):
    """The identity, with a gradient that is off."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * 1.5


def test_one_wrong_module_does_not_paint_what_follows(tmp_path: Path) -> None:
    model = scale_output("blocks.0.down", 1.01)
    train(tmp_path / "ref", build())
    train(tmp_path / "par", model)
    report = compare(tmp_path / "ref", tmp_path / "par", model=build)
    check_schema(report)
    wrong = [row for row in report.tensors if not row.ok]
    assert len(wrong) > 15  # it is everywhere by itself
    assert report.located is not None
    assert report.located["kind"] == "output"
    assert report.located["name"] == "blocks.0.down"
    [forward, *backward] = report.located["isolated"]
    assert (forward["name"], forward["class"]) == ("blocks.0.down", "Linear")
    assert forward["scale"] == pytest.approx(1.01)
    assert forward["file"].endswith("linear.py")
    # The factor is in the gradient as well; nothing else is wrong by itself.
    assert {item["name"].split(".")[1] for item in backward} <= {"0"}


def test_a_wrong_gradient_inside_a_module(tmp_path: Path) -> None:
    model = build()
    model.get_submodule("blocks.1.up").register_forward_hook(
        lambda module, args, out: Backwards.apply(out)
    )
    found = isolated(tmp_path, model)
    # What came out of it is right; what goes back through it is not.
    assert found[0].startswith("output_grad")
    assert not any(name.startswith("output ") for name in found)
    assert all("blocks.0.down" not in name and "head" not in name for name in found)


def test_a_reduction_that_is_missing_is_the_parameters_own_fault(tmp_path: Path) -> None:
    def halve(model: nn.Module) -> None:
        weight = model.get_parameter("blocks.1.down.weight")
        assert weight.grad is not None
        weight.grad.mul_(0.5)

    assert isolated(tmp_path, change=halve) == ["grad blocks.1.down.weight"]


def test_a_model_is_asked_for_only_if_something_is_wrong(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", build(), micro_batches=4)
    report = compare(tmp_path / "ref", tmp_path / "par", model=lambda: 1 / 0)
    assert report.verdict == "aligned"
    assert report.located is None


def test_without_recorded_outputs_the_report_says_what_to_record(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", scale_output("norm", 2.0), what=("loss", "params", "grads"))
    report = compare(tmp_path / "ref", tmp_path / "par", model=build)
    assert report.located is not None
    assert report.located["isolated"] is None
    assert any("recorded no module outputs" in note for note in report.notes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: 3, "model returned a int"),
        (lambda: nn.Linear(2, 2), "weight is not in the reference"),
        (lambda: nn.Sequential(build()), "0.embed.weight is not in the reference"),
    ],
)
def test_a_wrong_model_is_refused(tmp_path: Path, wrong: object, message: str) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", scale_output("norm", 2.0))
    with pytest.raises(ConfigError, match=message):
        compare(tmp_path / "ref", tmp_path / "par", model=wrong)  # type: ignore[arg-type]


def test_the_first_divergence_is_the_first_row_out_of_budget() -> None:
    def row(name: str, ok: bool) -> TensorRow:
        return TensorRow("grad", name, 1, 0.0, 0.0, 1.0, None, None, None, ok)

    assert first_divergence([row("a", True)]) is None
    found = first_divergence([row("a", True), row("b", False), row("c", False)])
    assert found == {"kind": "grad", "name": "b", "step": 1, "isolated": None}
