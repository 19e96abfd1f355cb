from __future__ import annotations

import pytest

from paralign.align.inspect import inspect
from paralign.align.trace import Kind
from tests.align.inspect.runs import look, norm_of, on, only, plain_step
from tests.align.synthetic import write_trace


def clipped(by):
    step = plain_step()
    return {
        **step,
        **{(Kind.CLIPPED_GRAD, name): by * g for (kind, name), g in step.items() if kind == "grad"},
    }


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_one_coefficient_that_norm_and_limit_give(tmp_path, eps):
    step = plain_step()
    report = look(tmp_path, [clipped(0.5 / (norm_of(step) + eps))], facts={"clip": 0.5})
    check = next(check for check in report.checks if check.name == "clipping")
    assert (report.verdict, check.looked_at) == ("clean", 12)


def test_another_norm_than_the_reported_one(tmp_path):
    finding = only(look(tmp_path, [clipped(0.25)], facts={"clip": 0.5}))
    assert (finding.component, finding.cause) == ("clipping", "wrong_norm")
    assert "by another norm, of 2, " in finding.fix


def test_ranks_that_clip_by_different_norms(tmp_path):
    change = on({2, 3}, Kind.CLIPPED_GRAD, "*", lambda g: g / 2)
    finding = only(look(tmp_path, [clipped(0.25)], change=change))
    assert (finding.cause, finding.axes) == ("wrong_norm", ["dp"])


def test_gradients_that_disagree_have_no_one_coefficient(tmp_path):
    def change(rank, entry, local):
        return 2 * local if rank >= 2 and entry.kind == Kind.GRAD else local

    report = look(tmp_path, [clipped(0.25)], change=change)
    assert {finding.component for finding in report.findings} == {"reduction"}
    check = next(check for check in report.checks if check.name == "clipping")
    assert "no one norm" in str(check.why_not)


def test_stages_that_clip_by_their_own_norms(tmp_path):
    stage = {"embed.weight": 0, "layers.0.w": 1, "norm.weight": 1}
    write_trace(
        tmp_path,
        [clipped(0.25)],
        mesh={"pp": 2},
        leave_out=lambda rank, entry: stage[entry.name] != rank,
        change=on({1}, Kind.CLIPPED_GRAD, "*", lambda g: g / 3),
    )
    assert only(inspect(tmp_path)).axes == ["pp"]


def test_parameters_that_are_clipped_by_themselves(tmp_path):
    change = on({0, 1, 2, 3}, Kind.CLIPPED_GRAD, "norm.weight", lambda g: g / 3)
    finding = only(look(tmp_path, [clipped(0.25)], change=change))
    assert finding.axes == []
    assert "Clip all parameters together" in finding.fix
