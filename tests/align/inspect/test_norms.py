from __future__ import annotations

import math

import pytest
import torch

from paralign.align.trace import Kind
from tests.align.inspect.runs import look, norm_of, only, plain_step, sharded
from tests.align.synthetic import write_trace


def squares(step):
    return {name: float(t.norm()) ** 2 for (kind, name), t in step.items() if kind == Kind.GRAD}


def first_shard_square(step):
    return float(step[Kind.GRAD, "embed.weight"][:4].norm()) ** 2


def test_replicas_counted_twice_are_told_with_their_axis(tmp_path):
    step = plain_step()
    own = squares(step)
    # Shards over dp summed as they should be, but copies over dp as well.
    wrong = math.sqrt(own["embed.weight"] + 2 * (own["layers.0.w"] + own["norm.weight"]))
    finding = only(look(tmp_path, [step], norm=wrong))
    assert (finding.component, finding.cause, finding.axes) == ("clipping", "wrong_norm", ["dp"])
    assert "copies count more than once" in finding.fix


def test_a_sum_over_an_axis_of_copies_only(tmp_path):
    step = plain_step()
    wrong = math.sqrt(2) * norm_of(step)
    report = look(tmp_path, [step], norm=wrong, placements=lambda name: ())
    finding = only(report)
    assert finding.cause == "wrong_norm"
    assert finding.axes in (["dp"], ["cp"])


def test_one_stages_norm_is_told_as_such(tmp_path):
    step = plain_step()
    mine = {0: ("embed.weight",), 1: ("layers.0.w", "norm.weight")}
    own = squares(step)
    norm = math.sqrt(own["embed.weight"])
    write_trace(
        tmp_path,
        [step],
        mesh={"pp": 2},
        leave_out=lambda rank, entry: entry.name not in mine[rank],
        norm=norm,
    )
    # Rank 0 reports its own stage's norm; rank 1 reports rank 0's, which is nobody's there.
    from paralign.align.inspect import inspect

    findings = inspect(tmp_path).findings
    assert findings[0].axes == ["pp"]
    assert findings[0].evidence["reported"] == {"0": pytest.approx(norm)}
    assert "not added up over pp" in findings[0].fix


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda own: own["embed.weight"] + own["layers.0.w"], "leaves out norm.weight"),
        (lambda own: sum(own.values()) + own["norm.weight"], "counts norm.weight twice"),
    ],
)
def test_a_parameter_left_out_or_counted_twice_is_named(tmp_path, wrong, words):
    step = plain_step()
    finding = only(
        look(tmp_path, [step], norm=math.sqrt(wrong(squares(step))), placements=lambda name: ())
    )
    assert (finding.cause, finding.tensor) == ("wrong_norm", "norm.weight")
    assert words in finding.fix


def test_other_norms_are_told(tmp_path):
    step = plain_step()
    gradients = [t for (kind, _), t in step.items() if kind == Kind.GRAD]
    largest = max(float(g.abs().max()) for g in gradients)
    assert "the largest element" in only(look(tmp_path, [step], norm=largest)).fix
    total = sum(float(g.norm()) for g in gradients)
    assert "the sum of the parameters' norms" in only(look(tmp_path, [step], norm=total)).fix
    square = norm_of(step) ** 2
    assert "no root was taken" in only(look(tmp_path, [step], norm=square)).fix


def test_a_factor_is_told_with_the_axis_of_its_size(tmp_path):
    step = plain_step()
    report = look(
        tmp_path, [step], mesh={"dp": 3}, placements=lambda name: (), norm=norm_of(step) / 3
    )
    finding = only(report)
    assert (finding.cause, finding.axes) == ("constant_factor", ["dp"])


def test_an_unexplained_norm_is_a_finding_still(tmp_path):
    finding = only(look(tmp_path, [plain_step()], norm=0.1234567))
    assert (finding.cause, finding.axes) == ("wrong_norm", [])
    assert "no part of them has this norm" in finding.fix


def test_nan_is_no_norm_either(tmp_path):
    assert only(look(tmp_path, [plain_step()], norm=float("nan"))).component == "clipping"


def test_rounding_is_no_finding(tmp_path):
    step = plain_step()
    assert look(tmp_path, [step], norm=norm_of(step) * (1 + 1e-15)).verdict == "clean"


def test_pending_sums_are_added_before_the_norm(tmp_path):
    from torch.distributed.tensor import Partial, Replicate

    step = plain_step()
    whole = {key: 2 * t if key == (Kind.GRAD, "layers.0.w") else t for key, t in step.items()}

    def placements(name):
        return (Partial(), Replicate()) if name == "layers.0.w" else sharded(name)

    grad_only = {key: t for key, t in step.items() if key[0] == Kind.GRAD}
    report = look(tmp_path, [grad_only], placements=placements, norm=norm_of(whole))
    assert report.verdict == "clean"
    assert torch.isfinite(torch.tensor(norm_of(whole)))
