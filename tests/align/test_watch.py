from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_before

from paralign.align import record
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from tests.align.toys import EVERYTHING, batches, build, loss_of, tensors, train


def clip_in_two_calls(parameters: Any, max_norm: float) -> None:
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters, norm: torch.nn.utils.clip_grad_norm_(parameters, norm),
        lambda parameters, norm: torch.nn.utils.clip_grad.clip_grad_norm_(parameters, norm),
        clip_imported_before,
        clip_in_two_calls,
    ],
    ids=["attribute", "module", "imported before", "two calls"],
)
def test_gradients_are_taken_before_clipping(tmp_path: Path, clip: Callable[..., Any]) -> None:
    model = build()
    tokens, labels = next(batches(1))
    loss_of(model, tokens, labels, labels.numel()).backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([g.norm() for g in expected.values()]).norm()
    assert norm > 0.01, "clipping would do nothing"
    model = build()
    with record(tmp_path / "t", model):
        train(model, 1, clip=clip)
    found = tensors(tmp_path / "t")
    assert {name for kind, _, name in found if kind == Kind.GRAD} == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[Kind.GRAD, 0, name], gradient)
    with TraceReader(tmp_path / "t") as reader:
        (value,) = [e.value for e in reader.ranks[0].scalars if e.kind == "norm"]
    assert value == pytest.approx(float(norm), rel=1e-12)


def test_gradients_hidden_in_a_call_are_taken_on_demand(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model, what=("grads", "norm")) as rec:

        def engine(parameters: Any, max_norm: float) -> None:
            rec.gradients()
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1e-3)
            rec.norm(7.0)

        train(model, 1, clip=engine)
    gradient = tensors(tmp_path / "t")[Kind.GRAD, 0, "norm.weight"]
    assert model.norm.weight.grad is not None
    torch.testing.assert_close(gradient, model.norm.weight.grad * 1e3)


def test_a_reported_norm_counts_instead_of_a_seen_one(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "t", model) as rec:

        def clip(parameters: Any, max_norm: float) -> None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            rec.norm(torch.tensor(3.0))

        train(model, 1, clip=clip)
    with TraceReader(tmp_path / "t") as reader:
        assert [e.value for e in reader.ranks[0].scalars if e.kind == "norm"] == [3.0]


def test_everything_is_put_back(tmp_path: Path) -> None:
    names = ("clip_grad_norm_", "get_total_norm", "clip_grads_with_norm_")
    before = [getattr(torch.nn.utils, name) for name in names]
    inside = dict(vars(torch.nn.utils.clip_grad))
    model = build()
    with record(tmp_path / "t", model, steps=1):
        assert torch.nn.utils.clip_grad_norm_ is not before[0]
        train(model, 3)
        # One step is recorded; then the recorder detaches by itself.
        assert torch.nn.utils.clip_grad_norm_ is before[0]
        with TraceReader(tmp_path / "t") as reader:
            assert reader.facts.steps == [0]
    assert [getattr(torch.nn.utils, name) for name in names] == before
    assert dict(vars(torch.nn.utils.clip_grad)) == inside


def test_other_models_and_optimizers_are_not_ours(tmp_path: Path) -> None:
    model, other = build(), build()
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    with record(tmp_path / "t", model, steps=1):
        for tokens, labels in batches(2):
            loss_of(other, tokens, labels, 1).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            theirs.step()
        train(model, 1)
    with TraceReader(tmp_path / "t") as reader:
        gradients = [e for e in reader.ranks[0].tensors if e.kind == Kind.GRAD and e.file]
        assert len(gradients) == 6


def test_several_optimizers_end_a_step_together(tmp_path: Path) -> None:
    model = build()
    model.unused.requires_grad_(False)
    first = torch.optim.SGD([model.embed.weight], lr=0.1)
    rest = [p for n, p in model.named_parameters() if p.requires_grad and n != "embed.weight"]
    second = torch.optim.Adam(rest, lr=0.1)
    for given, folder in ((None, "found"), ([first, second], "given")):
        with record(tmp_path / folder, model, optimizer=given, steps=2, what=EVERYTHING):
            for tokens, labels in batches(2):
                loss_of(model, tokens, labels, labels.numel()).backward()
                for optimizer in (first, second):
                    group = optimizer.param_groups[0]["params"]
                    torch.nn.utils.clip_grad_norm_(group, 1e-3)
                    optimizer.step()
                model.zero_grad()
        with TraceReader(tmp_path / folder) as reader:
            assert reader.facts.steps == [0, 1]
            assert [o["class"] for o in reader.ranks[0].optimizers] == ["SGD", "Adam"]
        found = tensors(tmp_path / folder)
        # Taken at the first clipping: the second group's are not clipped yet either.
        assert found[Kind.GRAD, 1, "norm.weight"].norm() > 2e-3
        assert torch.equal(found[Kind.PARAM_AFTER, 1, "norm.weight"], model.norm.weight)


def test_a_trainable_parameter_without_optimizer_only_delays_the_end_of_a_step(
    tmp_path: Path,
) -> None:
    model = build()
    optimizer = torch.optim.SGD([model.embed.weight], lr=0.1)
    kept = []
    with record(tmp_path / "t", model, steps=2, what=("grads", "params")):
        for tokens, labels in batches(2):
            optimizer.zero_grad()
            loss_of(model, tokens, labels, labels.numel()).backward()
            assert model.embed.weight.grad is not None
            kept.append(model.embed.weight.grad.clone())
            torch.nn.utils.clip_grad_norm_([model.embed.weight], 1e-3)
            optimizer.step()
            kept.append(model.embed.weight.detach().clone())
    found = tensors(tmp_path / "t")
    for step in (0, 1):
        assert torch.equal(found[Kind.GRAD, step, "embed.weight"], kept[2 * step])
        assert torch.equal(found[Kind.PARAM_AFTER, step, "embed.weight"], kept[2 * step + 1])


class Engine:
    """Something with ``step()`` that is no torch optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, factor: float) -> str:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(factor * parameter.grad)
        return "stepped"


def test_anything_with_step_is_an_optimizer(tmp_path: Path) -> None:
    model = build()
    engine = Engine(model)
    with record(tmp_path / "t", model, optimizer=engine):
        tokens, labels = next(batches(1))
        loss_of(model, tokens, labels, 1).backward()
        assert engine.step(0.5) == "stepped"
    assert "step" not in vars(engine)
    found = tensors(tmp_path / "t")
    name = "norm.weight"
    change = found[Kind.PARAM, 0, name] - found[Kind.PARAM_AFTER, 0, name]
    torch.testing.assert_close(change, 0.5 * found[Kind.GRAD, 0, name])
