from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from paralign.align.trace import Kind
from tests.align.inspect.runs import look, on, only, plain_step


def with_gradient(name, value):
    return {**plain_step(), (Kind.GRAD, name): value}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_named_with_its_ranks(tmp_path, value):
    report = look(
        tmp_path,
        [plain_step()],
        change=on({2, 3}, Kind.GRAD, "embed.weight", lambda g: torch.full_like(g, value)),
    )
    finding = only(report)
    assert (finding.component, finding.tensor) == ("backward", "embed.weight")
    assert finding.evidence["ranks"] == [2, 3]


def test_none_everywhere_is_a_finding_unless_the_model_does_not_use_it(tmp_path):
    step = with_gradient("norm.weight", None)
    finding = only(look(tmp_path, [step]))
    assert (finding.cause, finding.tensor) == ("missing_contribution", "norm.weight")
    assert "1 of 3 parameters" in finding.fix
    assert look(tmp_path, [step], unused=["norm.*"]).verdict == "clean"


def test_no_gradient_at_all_asks_for_the_backward(tmp_path):
    step = {key: None if key[0] == Kind.GRAD else value for key, value in plain_step().items()}
    assert "None has one" in only(look(tmp_path, [step], norm=None)).fix


def test_zero_everywhere_is_a_finding(tmp_path):
    step = with_gradient("layers.0.w", torch.zeros(4, 6, dtype=torch.float64))
    finding = only(look(tmp_path, [step]))
    assert (finding.cause, finding.tensor) == ("missing_contribution", "layers.0.w")
    assert "exactly zero on every rank" in finding.fix


def test_an_expert_may_have_no_tokens(tmp_path):
    step = plain_step()
    for kind in (Kind.PARAM, Kind.GRAD):
        step[kind, "experts.3.w"] = torch.zeros(3, 3, dtype=torch.float64)
    report = look(tmp_path, [step])
    assert report.verdict == "clean"
    assert "an expert without tokens?" in report.notes[0]


def test_a_shard_of_zeros_is_a_finding_where_zeros_are_rare(tmp_path):
    report = look(
        tmp_path,
        [plain_step()],
        placements=lambda name: (
            (Shard(0), Shard(1)) if name == "layers.0.w" else (Replicate(), Replicate())
        ),
        norm=None,
        change=on({3}, Kind.GRAD, "layers.0.w", torch.zeros_like),
    )
    finding = only(report)
    assert (finding.component, finding.evidence["ranks"]) == ("reduction", [3])


def test_rows_of_an_embedding_may_be_zero(tmp_path):
    step = plain_step()
    step[Kind.GRAD, "embed.weight"][2:] = 0.0  # tokens that did not occur
    assert look(tmp_path, [step]).verdict == "clean"


def test_frozen_parameters_need_no_gradient(tmp_path, monkeypatch):
    from paralign.align.trace import TensorEntry

    original = TensorEntry.to_json

    def frozen(entry):
        return {**original(entry), "trainable": entry.name != "norm.weight"}

    monkeypatch.setattr(TensorEntry, "to_json", frozen)
    assert look(tmp_path, [with_gradient("norm.weight", None)]).verdict == "clean"


def test_a_trace_without_gradients_says_so(tmp_path):
    step = {key: value for key, value in plain_step().items() if key[0] == Kind.PARAM}
    report = look(tmp_path, [step], norm=None)
    check = next(check for check in report.checks if check.name == "gradients")
    assert (check.looked_at, check.why_not) == (0, "no gradients were recorded")
