from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from paralign.align.trace import Kind
from tests.align.inspect.runs import look, on, only, plain_step

NAME = "layers.0.w"
NAMES = ["embed.weight", NAME, "norm.weight"]


def optimizer(kind, rate, names=NAMES):
    return [{"class": kind, "groups": [{"options": {"lr": rate}, "names": names}]}]


ADAM = optimizer("AdamW", 1e-2)


def still(step, *names):
    frozen = {(Kind.PARAM_AFTER, name): step[Kind.PARAM, name] for name in names}
    return {**step, **frozen}


def test_a_parameter_that_no_optimizer_holds(tmp_path):
    held = optimizer("AdamW", 1e-2, ["embed.weight"])
    step = still(plain_step(), NAME)
    finding = only(look(tmp_path, [step], optimizers=held))
    assert (finding.component, finding.cause) == ("optimizer", "missing_contribution")
    assert (finding.tensor, finding.evidence["without_optimizer"]) == (NAME, 1)


def test_nothing_moves_at_all(tmp_path):
    step = still(plain_step(), "embed.weight", NAME, "norm.weight")
    finding = only(look(tmp_path, [step], optimizers=ADAM))
    assert finding.cause == "stale"
    assert "Nothing moved at all" in finding.fix


def test_a_shard_that_does_not_move_names_its_axis(tmp_path):
    step = plain_step()
    before = step[Kind.PARAM, NAME]
    report = look(
        tmp_path,
        [step],
        placements=lambda name: (
            (Shard(0), Replicate()) if name == NAME else (Replicate(), Replicate())
        ),
        change=on({2, 3}, Kind.PARAM_AFTER, NAME, lambda _: before[2:]),
        optimizers=ADAM,
    )
    finding = only(report)
    assert (finding.cause, finding.axes, finding.evidence["ranks"]) == ("stale", ["dp"], [2, 3])


@pytest.mark.parametrize("rate", [0.0, 1e-20])
def test_a_step_too_small_to_see_is_a_note(tmp_path, rate):
    report = look(tmp_path, [still(plain_step(), NAME)], optimizers=optimizer("AdamW", rate))
    assert report.verdict == "clean"
    assert "4 pieces did not move" in report.notes[0]


def test_sgd_moves_by_its_gradient(tmp_path):
    step = still(plain_step(), NAME)
    assert only(look(tmp_path, [step], optimizers=optimizer("SGD", 1e-3))).cause == "stale"
    step[Kind.GRAD, NAME] = torch.full_like(step[Kind.GRAD, NAME], 1e-15)
    assert look(tmp_path, [step], optimizers=optimizer("SGD", 1e-3)).verdict == "clean"


def test_no_gradient_no_step(tmp_path):
    step = still(plain_step(), NAME)
    step[Kind.GRAD, NAME] = torch.zeros_like(step[Kind.GRAD, NAME])
    causes = [f.component for f in look(tmp_path, [step], optimizers=ADAM).findings]
    assert causes == ["backward"]  # the zero itself, not the parameter that stays
