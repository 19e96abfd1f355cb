from __future__ import annotations

import re

import pytest
import torch

from paralign.align.trace import Kind
from paralign.errors import AlignError, ConfigError, TraceError
from paralign.testing import assert_aligned, run_on_ranks
from tests.align.synthetic import toy_step, write_trace
from tests.testing import live_runs
from tests.testing.live_runs import backward, model, reference, rows


def doubled(step):
    return {key: 2 * value if key[0] == Kind.GRAD else value for key, value in step.items()}


def gradients_of(net):
    return {name: p.grad for name, p in net.named_parameters()}


def traces(tmp_path, parallel):
    return (
        write_trace(tmp_path / "ref", [toy_step()]),
        write_trace(tmp_path / "par", [parallel], mesh={"dp": 2}),
    )


def test_traces_of_the_same_run_pass(tmp_path):
    report = assert_aligned(*traces(tmp_path, toy_step()))
    assert (report.verdict, report.coverage.compared) == ("aligned", 3)


def test_other_traces_fail_with_verdict_finding_and_fix(tmp_path):
    with pytest.raises(AlignError) as caught:
        assert_aligned(*traces(tmp_path, doubled(toy_step())))
    text = str(caught.value)
    assert text.startswith("misaligned: first out of budget: grad embed.weight at step 0")
    assert "  1. " in text
    assert "constant_factor over dp" in text
    assert isinstance(caught.value, AssertionError)


def test_what_cannot_be_told_fails_too(tmp_path):
    step = {key: value for key, value in toy_step().items() if key != (Kind.GRAD, "norm.weight")}
    folders = traces(tmp_path, step)
    with pytest.raises(AlignError, match=r"^inconclusive: .*norm\.weight"):
        assert_aligned(*folders)


def test_a_live_pair_right_after_backward():
    assert assert_aligned(reference(), reference()).verdict == "aligned"
    wrong = model()
    backward(wrong, rows(), 16)
    with pytest.raises(AlignError, match="misaligned"):
        assert_aligned(reference(), wrong)


def test_gradients_by_name_are_a_reference():
    gradients = gradients_of(reference())
    assert assert_aligned(gradients, reference()).coverage.compared == 6
    gradients["3.bias"] = gradients["3.bias"] + 1
    with pytest.raises(AlignError, match=r"3\.bias"):
        assert_aligned(gradients, reference())


def test_a_gradient_that_is_missing_on_one_side_fails():
    net = reference()
    net.get_parameter("3.bias").grad = None
    with pytest.raises(AlignError, match=r"3\.bias"):
        assert_aligned(reference(), net)


def test_other_weights_are_inconclusive_and_not_a_pass():
    other = model(seed=1)
    backward(other, rows(), 8)
    with pytest.raises(AlignError, match=r"^inconclusive: .*different weights"):
        assert_aligned(reference(), other)


def test_a_truth_in_float64_for_runs_in_float32():
    dtype = torch.float32
    truth = model(dtype=dtype).double()
    backward(truth, rows(dtype).double(), 8)
    report = assert_aligned(reference(dtype), reference(dtype), truth=truth)
    assert report.yardstick == "truth"


def test_recording_leaves_the_gradients_alone():
    net = reference()
    before = {name: gradient.clone() for name, gradient in gradients_of(net).items()}
    assert_aligned(reference(), net)
    after = gradients_of(net)
    assert all(torch.equal(after[name], gradient) for name, gradient in before.items())


def test_a_folder_keeps_the_traces(tmp_path):
    assert_aligned(reference(), reference(), folder=tmp_path / "kept")
    assert assert_aligned(tmp_path / "kept/reference", tmp_path / "kept/parallel").verdict


def test_a_trace_is_a_reference_for_a_live_module(tmp_path):
    gradients = gradients_of(reference())
    assert_aligned(gradients, reference(), folder=tmp_path)
    assert assert_aligned(tmp_path / "reference", reference()).coverage.compared == 6
    assert_aligned(reference(), reference(), folder=tmp_path)
    with pytest.raises(AlignError, match="inconclusive"):
        assert_aligned(tmp_path / "reference", reference())
    assert assert_aligned(tmp_path / "reference", reference(), allow_skipped=True)


@pytest.mark.parametrize(
    ("sides", "words"),
    [
        ((reference, lambda: 3), "parallel=int is neither a trace folder nor a module"),
        ((lambda: 3, reference), "reference=int is neither"),
        ((dict, reference), "there is no gradient to compare with"),
        ((lambda: {"3.bias": [1.0]}, reference), "'3.bias' is a list, not a tensor"),
    ],
)
def test_anything_else_is_refused(sides, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        assert_aligned(*(side() for side in sides))


def test_a_folder_that_is_no_trace_is_refused(tmp_path):
    with pytest.raises(TraceError):
        assert_aligned(tmp_path, tmp_path)


@pytest.mark.ranks
def test_sharded_modules_on_ranks_pass():
    assert run_on_ranks(live_runs.fsdp_run, 2, None) == [{"verdict": "aligned", "compared": 6}] * 2


@pytest.mark.ranks
def test_every_rank_fails_with_the_finding():
    with pytest.raises(AlignError, match="constant_factor over dp") as caught:
        run_on_ranks(live_runs.fsdp_run, 2, "factor")
    assert "(the same on all 2 ranks)" in str(caught.value)


@pytest.mark.ranks
def test_copies_on_ranks_against_gradients_by_name():
    assert run_on_ranks(live_runs.plain_run, 2, True) == ["aligned", "aligned"]
    with pytest.raises(AlignError, match="misaligned"):
        run_on_ranks(live_runs.plain_run, 2, False)
