from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paralign.align import Report, compare
from paralign.align.trace import Kind
from paralign.errors import ConfigError
from tests.align.judging import check_schema, judge, row
from tests.align.synthetic import toy_step, with_kind, write_trace

Step = dict[tuple[str, str], Tensor]


def rounded(step: Step, seed: int, size: float) -> Step:
    """Return another run of the same step, off by ``size`` relatively."""
    generator = torch.Generator().manual_seed(seed)
    return {
        key: value
        if key[0] == Kind.PARAM
        else value * (1 + size * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        for key, value in step.items()
    }


def with_noise(tmp_path: Path, parallel: Step, noise: Step, **options: Any) -> Report:
    low = {"compute_dtype": "float32"}
    write_trace(tmp_path / "ref", [toy_step(dtype=torch.float32)], facts=low)
    write_trace(tmp_path / "noise", [noise], facts=low, **options)
    write_trace(tmp_path / "par", [parallel], facts=low)
    report = compare(tmp_path / "ref", tmp_path / "par", noise=tmp_path / "noise")
    check_schema(report)
    return report


def test_a_second_reference_measures_what_rounding_may_do(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.float32)
    # Off by 1e-4: far beyond the uncalibrated table, but so is the reference from itself.
    report = with_noise(tmp_path, rounded(step, 1, 1e-4), rounded(step, 2, 1e-4))
    assert report.verdict == "aligned", report.why
    assert report.yardstick == "noise"
    assert row(report, "update", "embed.weight").budget_eps is not None
    plain = compare(tmp_path / "ref", tmp_path / "par")
    assert plain.verdict == "misaligned"
    worse = with_noise(tmp_path, rounded(step, 1, 1e-3), rounded(step, 2, 1e-4))
    assert worse.verdict == "misaligned"
    assert worse.why.startswith("first out of budget: grad")


def test_the_loss_is_held_against_the_second_reference_too(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.float32)
    noise = rounded(step, 2, 1e-5)
    assert with_noise(tmp_path, rounded(step, 1, 1e-5), noise, loss=2.0001).verdict == "aligned"
    write_trace(tmp_path / "par", [noise], facts={"compute_dtype": "float32"}, loss=2.0002)
    report = compare(tmp_path / "ref", tmp_path / "par", noise=tmp_path / "noise")
    assert report.verdict == "aligned", report.why
    write_trace(tmp_path / "par", [noise], facts={"compute_dtype": "float32"}, loss=2.01)
    report = compare(tmp_path / "ref", tmp_path / "par", noise=tmp_path / "noise")
    assert report.verdict == "misaligned"
    assert "loss" in report.why


def test_a_perturbed_start_of_the_second_reference_is_no_other_start(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.float32)
    noise = {
        key: value * (1 + 1e-6) if key[0] == Kind.PARAM else value
        for key, value in rounded(step, 2, 1e-6).items()
    }
    assert with_noise(tmp_path, rounded(step, 1, 1e-6), noise).verdict == "aligned"


def test_the_reference_itself_is_no_second_run(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.float32)
    report = with_noise(tmp_path, rounded(step, 1, 1e-7), step)
    assert report.verdict == "inconclusive"
    assert report.why.startswith("no budget: the noise run is the reference again")


def test_what_the_second_reference_lacks_is_not_compared(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.float32)
    noise = {key: v for key, v in rounded(step, 2, 1e-6).items() if key[1] != "norm.weight"}
    report = with_noise(tmp_path, step, noise)
    assert report.verdict == "inconclusive"
    assert {"name": "norm.weight", "why": "grad of step 0: not in the noise run"} in (
        report.coverage.skipped
    )


def test_noise_that_is_none_is_refused(tmp_path: Path) -> None:
    for name, dtype in (("double", "float64"), ("single", "float32"), ("half", "bfloat16")):
        step = toy_step(dtype=getattr(torch, dtype))
        write_trace(tmp_path / name, [step], facts={"compute_dtype": dtype})
    double, single, half = (tmp_path / name for name in ("double", "single", "half"))
    with pytest.raises(ConfigError, match="this one is in fp64"):
        compare(double, double, noise=double)
    with pytest.raises(ConfigError, match="was computed in bfloat16, the run under test in float3"):
        compare(single, single, noise=half)
    with pytest.raises(ConfigError, match="two ways to measure the same"):
        compare(single, single, noise=single, truth=double)


def chosen(step: Step, experts: list[int]) -> Step:
    """Return the step with a tensor of choices among its moments."""
    return {**step, ("moment:experts", "layers.0.w"): torch.tensor([experts] * 4)}


def test_choices_are_equal_in_float64(tmp_path: Path) -> None:
    base = chosen(toy_step(), [0, 1, 2, 3, 4, 5])
    report = judge(tmp_path, [base], [base])
    assert report.verdict == "aligned", report.why
    assert {r.category for r in report.tensors if r.state == "experts"} == {"discrete"}
    report = judge(tmp_path, [chosen(toy_step(), [0, 1, 2, 3, 5, 4])], [base])
    assert report.verdict == "misaligned"
    (flipped,) = [r for r in report.tensors if r.state == "experts"]
    assert (flipped.ok, flipped.rel_l2, flipped.budget_eps) == (False, 8 / 24, 0.0)
    assert flipped.worst_index == (0, 4)
    assert flipped.worst_values == (4.0, 5.0)
    assert "8 of 24 values of layers.0.w differ" in report.notes[-1]


def test_choices_that_flip_are_counted_in_low_precision(tmp_path: Path) -> None:
    step = toy_step(dtype=torch.bfloat16)
    low = {"compute_dtype": "bfloat16"}
    write_trace(tmp_path / "ref", [chosen(step, [0, 1, 2, 3, 4, 5])], facts=low)
    write_trace(tmp_path / "par", [chosen(step, [0, 1, 2, 3, 4, 4])], facts=low)
    report = compare(tmp_path / "ref", tmp_path / "par")
    check_schema(report)
    assert report.verdict == "aligned", report.why
    (flipped,) = [r for r in report.tensors if r.state == "experts"]
    assert (flipped.budget_eps, flipped.rel_l2) == (None, 4 / 24)
    assert any("4 of 24 values of layers.0.w differ" in note for note in report.notes)


def test_counts_of_ranks_that_disagree_are_seen(tmp_path: Path) -> None:
    base = chosen(toy_step(), [0, 1, 2, 3, 4, 5])

    def spoil(rank: int, entry: Any, local: Tensor) -> Tensor:
        return local + 1 if rank == 3 and entry.state == "experts" else local

    write_trace(tmp_path / "ref", [base])
    write_trace(tmp_path / "par", [base], mesh={"dp": 4}, change=spoil)
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert report.verdict == "misaligned"


def test_gradients_of_micro_batches_are_summands_and_not_compared(tmp_path: Path) -> None:
    step = toy_step()
    parts = with_kind(step, Kind.MICRO_GRAD, **{"layers.0.w": step[Kind.GRAD, "layers.0.w"] * 0.5})
    assert judge(tmp_path, [parts], [step]).verdict == "aligned"
