from __future__ import annotations

import pytest
import torch

from paralign.align.trace import Kind
from tests.align.inspect.runs import look, on, only, plain_step
from tests.align.synthetic import toy_step

NAME = "layers.0.w"


def other(tensor):
    return tensor + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(9)).to(tensor)


def test_a_consistent_run_has_no_finding(tmp_path):
    report = look(tmp_path, [plain_step()])
    assert (report.verdict, report.findings, report.exit_status) == ("clean", [], 0)
    looked = {check.name: check.looked_at for check in report.checks}
    assert looked["replicas"] == 4 * 4  # three parameters, the embedding in two shards, four kinds


@pytest.mark.parametrize(("ranks", "axes"), [({2, 3}, ["dp"]), ({1, 3}, ["cp"])])
def test_gradients_that_lack_a_reduction_name_its_axis(tmp_path, ranks, axes):
    finding = only(look(tmp_path, [plain_step()], change=on(ranks, Kind.GRAD, NAME, other)))
    assert (finding.component, finding.cause) == ("reduction", "missing_reduction")
    assert (finding.axes, finding.tensor) == (axes, NAME)
    assert f"Reduce them over {axes[0]}" in finding.fix


def test_one_rank_alone_is_named(tmp_path):
    finding = only(look(tmp_path, [plain_step()], change=on({3}, Kind.GRAD, NAME, other)))
    assert (finding.cause, finding.evidence["ranks"]) == ("single_rank", [3])
    assert "Only rank 3 is off" in finding.fix


def test_a_factor_between_replicas_is_told(tmp_path):
    report = look(tmp_path, [plain_step()], change=on({2, 3}, Kind.GRAD, NAME, lambda g: g / 2))
    finding = only(report)
    assert (finding.cause, finding.axes) == ("constant_factor", ["dp"])
    assert finding.evidence["factor"] == 0.5


def test_a_reduction_over_a_part_of_the_axis_is_a_wrong_group(tmp_path):
    report = look(
        tmp_path,
        [plain_step()],
        mesh={"dp": 4},
        placements=lambda name: (),
        change=on({2, 3}, Kind.GRAD, NAME, other),
    )
    finding = only(report)
    assert (finding.cause, finding.axes) == ("wrong_group", ["dp"])
    assert finding.evidence["classes"] == [[0, 1], [2, 3]]


def test_weights_that_differ_from_the_start_hide_what_follows_from_them(tmp_path):
    def change(rank, entry, local):
        return other(local) if rank >= 2 and entry.name == NAME else local

    finding = only(look(tmp_path, [plain_step()], change=change))
    assert (finding.component, finding.cause, finding.axes) == ("weights", "rng", ["dp"])
    assert "shards={...}" in finding.fix


def test_an_optimizer_that_differs_is_seen_where_gradients_agree(tmp_path):
    report = look(tmp_path, [plain_step()], change=on({1, 3}, Kind.PARAM_AFTER, NAME, other))
    finding = only(report)
    assert (finding.component, finding.cause, finding.axes) == ("optimizer", "unknown", ["cp"])


def test_a_copy_that_was_not_refreshed_is_stale(tmp_path):
    step = plain_step()
    old = step[Kind.PARAM, NAME]
    report = look(tmp_path, [step], change=on({2, 3}, Kind.PARAM_AFTER, NAME, lambda _: old))
    causes = {(finding.component, finding.cause) for finding in report.findings}
    assert causes == {("optimizer", "stale")}


def test_moments_are_looked_at_too(tmp_path):
    finding = only(look(tmp_path, [plain_step()], change=on({1, 3}, Kind.MOMENT, NAME, other)))
    assert (finding.component, finding.tensor) == ("state", f"{NAME} [exp_avg]")


def test_last_bits_are_a_note(tmp_path):
    change = on({2, 3}, Kind.GRAD, NAME, lambda g: g * (1 + 2**-52))
    report = look(tmp_path, [plain_step()], change=change)
    assert report.verdict == "clean"
    assert "differ in their last bits" in report.notes[0]


def test_rounding_that_cancels_may_differ_between_replicas(tmp_path):
    step = plain_step()
    step[Kind.GRAD, "norm.weight"] = 1e-17 * step[Kind.GRAD, "norm.weight"]
    report = look(tmp_path, [step], change=on({2, 3}, Kind.GRAD, "norm.weight", lambda g: -g))
    assert report.verdict == "clean"


def test_a_second_step_is_not_judged_after_a_wrong_first_one(tmp_path):
    change = on({2, 3}, Kind.GRAD, NAME, other)
    report = look(tmp_path, [toy_step(0), toy_step(1)], change=change)
    assert {finding.evidence["step"] for finding in report.findings} == {0}
