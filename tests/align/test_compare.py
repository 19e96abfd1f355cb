from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from paralign.align import compare
from paralign.align.budget import EPS
from paralign.align.trace import Kind
from paralign.errors import ConfigError
from tests.align.judging import MESH, SCHEMAS, check_schema, judge, noisy, row, sharded
from tests.align.synthetic import toy_step, with_kind, write_trace


def test_equal_runs_are_aligned(tmp_path: Path) -> None:
    report = judge(tmp_path, [toy_step()])
    assert (report.verdict, report.exit_status) == ("aligned", 0)
    assert report.coverage.parameters == report.coverage.compared == 3
    assert report.coverage.elements == 7 * 4 + 4 * 6 + 5
    assert report.coverage.paired["placement"] == 3
    assert report.loss == {"reference": 2.0, "parallel": 2.0, "rel": 0.0, "step": 0}
    assert report.mesh == MESH
    kinds = [r.kind for r in report.tensors]
    assert kinds == sorted(
        kinds,
        key=["param", "tokens", "loss", "grad", "norm", "moment", "update", "param_after"].index,
    )
    assert {"param", "loss", "tokens", "grad", "moment", "update", "param_after"} == set(kinds)


def test_rounding_is_aligned_and_measured_in_eps(tmp_path: Path) -> None:
    report = judge(tmp_path, [noisy(toy_step())])
    assert report.verdict == "aligned"
    assert 0.1 < row(report, "grad", "embed.weight").eps < 10
    assert report.worst is not None
    assert report.worst.strain < 1


def test_a_small_error_of_one_element_is_found(tmp_path: Path) -> None:
    step = toy_step()
    grad = step[Kind.GRAD, "layers.0.w"].clone()
    grad[2, 5] += 1e-10
    report = judge(tmp_path, [with_kind(step, Kind.GRAD, **{"layers.0.w": grad})])
    assert (report.verdict, report.exit_status) == ("misaligned", 1)
    wrong = row(report, "grad", "layers.0.w")
    assert wrong.worst_index == (2, 5)
    assert wrong.worst_values is not None
    assert wrong.worst_values[1] - wrong.worst_values[0] == pytest.approx(1e-10, rel=1e-5)
    assert report.why.startswith("first out of budget: grad layers.0.w at step 0")
    assert wrong.ranks_off == [3]


def test_nan_fails_on_either_side(tmp_path: Path) -> None:
    step = toy_step()
    grad = step[Kind.GRAD, "norm.weight"].clone()
    grad[1] = torch.nan
    report = judge(tmp_path, [with_kind(step, Kind.GRAD, **{"norm.weight": grad})])
    assert report.verdict == "misaligned"
    assert '"rel_l2": "nan"' in report.to_json()
    assert report.worst is not None
    assert report.worst.name == "norm.weight"
    both = [with_kind(step, Kind.GRAD, **{"norm.weight": grad})]
    assert judge(tmp_path, both, both).verdict == "misaligned"
    assert judge(tmp_path, [step], both).verdict == "misaligned"


def test_zero_over_zero_is_equal_and_something_over_zero_is_not(tmp_path: Path) -> None:
    step = toy_step()
    nothing = torch.zeros(5, dtype=torch.float64)
    zero = with_kind(step, Kind.GRAD, **{"norm.weight": nothing})
    report = judge(tmp_path, [zero], [zero])
    assert row(report, "grad", "norm.weight").rel_l2 == 0.0
    assert report.verdict == "aligned"
    report = judge(tmp_path, [step], [zero])
    wrong = row(report, "grad", "norm.weight")
    assert (wrong.rel_l2, wrong.ok) == (float("inf"), False)
    assert report.verdict == "misaligned"


def test_none_and_zero_gradients_are_the_same(tmp_path: Path) -> None:
    step = toy_step()
    none = with_kind(step, Kind.GRAD, **{"norm.weight": None})
    shapes = with_kind(step, Kind.GRAD, **{"norm.weight": torch.zeros(5, dtype=torch.float64)})
    report = judge(tmp_path, [none], [none])
    assert report.verdict == "aligned"
    assert not any((r.kind, r.name) == ("grad", "norm.weight") for r in report.tensors)
    assert judge(tmp_path, [shapes], [shapes]).verdict == "aligned"


def test_a_gradient_that_vanished_is_a_missing_contribution(tmp_path: Path) -> None:
    step = toy_step()
    gone = with_kind(step, Kind.GRAD, **{"layers.0.w": torch.zeros(4, 6, dtype=torch.float64)})
    report = judge(tmp_path, [gone])
    assert [(f.component, f.cause, f.tensor) for f in report.findings] == [
        ("backward", "missing_contribution", "layers.0.w")
    ]


def test_gradient_of_zero_in_theory_has_an_absolute_rule(tmp_path: Path) -> None:
    def steps(seed: int, size: float) -> Any:
        noise = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return with_kind(toy_step(), Kind.GRAD, **{"norm.weight": size * noise})

    after = torch.full((5,), 0.3, dtype=torch.float64)
    drifted = {**steps(2, 1e-18), (Kind.PARAM_AFTER, "norm.weight"): after}
    report = judge(tmp_path, [drifted], [steps(1, 1e-18)])
    assert report.verdict == "aligned"
    gradient = row(report, "grad", "norm.weight")
    assert gradient.category == "zero_in_theory"
    assert gradient.rel_l2 > 0.1
    assert gradient.budget_eps == 1.0
    assert gradient.eps <= 1.0
    assert row(report, "param_after", "norm.weight").budget_eps is None
    assert row(report, "update", "norm.weight").budget_eps is None
    assert "listed, not gated" in report.why
    report = judge(tmp_path, [steps(2, 1e-12)], [steps(1, 1e-18)])
    assert report.verdict == "misaligned"
    assert row(report, "grad", "norm.weight").ok is False


def test_swapped_layers_leave_norms_equal_and_are_found(tmp_path: Path) -> None:
    step = {}
    for kind in (Kind.PARAM, Kind.GRAD):
        for layer in (0, 1):
            generator = torch.Generator().manual_seed(layer + 7 * len(kind))
            draw = torch.randn(4, 4, generator=generator, dtype=torch.float64)
            step[kind, f"layers.{layer}.w"] = draw
    gradients = {key: value for key, value in step.items() if key[0] == Kind.GRAD}
    swapped = {
        **step,
        (Kind.GRAD, "layers.0.w"): gradients[Kind.GRAD, "layers.1.w"],
        (Kind.GRAD, "layers.1.w"): gradients[Kind.GRAD, "layers.0.w"],
    }
    what = ("loss", "params", "grads")
    write_trace(tmp_path / "ref", [step], what=what)
    write_trace(tmp_path / "par", [swapped], what=what)
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert report.verdict == "misaligned"
    assert [r.name for r in report.tensors if not r.ok] == ["layers.0.w", "layers.1.w"]


def test_other_initial_weights_are_inconclusive(tmp_path: Path) -> None:
    step = toy_step()
    weights = step[Kind.PARAM, "layers.0.w"].clone()
    weights[0, 0] = torch.nextafter(weights[0, 0], torch.tensor(9.0, dtype=torch.float64))
    report = judge(tmp_path, [with_kind(step, Kind.PARAM, **{"layers.0.w": weights})])
    assert (report.verdict, report.exit_status) == ("inconclusive", 4)
    assert report.why == (
        "the runs start from different weights: 1 of 3 parameters differ, first layers.0.w"
    )
    assert [(f.component, f.tensor) for f in report.findings] == [("weights", "layers.0.w")]


def test_update_and_moments_show_what_the_parameter_hides(tmp_path: Path) -> None:
    step = toy_step()
    before, after = step[Kind.PARAM, "layers.0.w"], step[Kind.PARAM_AFTER, "layers.0.w"]
    lazy = with_kind(
        step, Kind.PARAM_AFTER, **{"layers.0.w": before + (after - before) * (1 - 5e-10)}
    )
    report = judge(tmp_path, [lazy])
    assert row(report, "param_after", "layers.0.w").rel_l2 < 1e-12
    assert row(report, "param_after", "layers.0.w").ok
    assert not row(report, "update", "layers.0.w").ok
    assert report.verdict == "misaligned"
    assert report.findings[0].component == "optimizer"
    moments = {
        key: 2 * value if key == ("moment:exp_avg", "norm.weight") else value
        for key, value in step.items()
    }
    report = judge(tmp_path, [moments])
    assert (report.findings[0].cause, report.findings[0].tensor) == (
        "constant_factor",
        "norm.weight [exp_avg]",
    )


def test_loss_tokens_and_norm(tmp_path: Path) -> None:
    assert judge(tmp_path, [toy_step()], loss=2.0 * (1 + 5e-15)).verdict == "aligned"
    report = judge(tmp_path, [toy_step()], loss=2.0 * (1 + 1e-13))
    assert (report.verdict, report.findings[0].component) == ("misaligned", "loss")
    report = judge(tmp_path, [toy_step()], loss=4.0)
    assert (report.findings[0].component, report.findings[0].cause) == ("loss", "reported_value")
    report = judge(tmp_path, [toy_step()], tokens=11)
    assert (report.findings[0].component, report.findings[0].cause) == ("data", "reported_value")
    assert judge(tmp_path, [toy_step()], loss=float("nan")).verdict == "misaligned"
    write_trace(tmp_path / "ref", [toy_step()], norm=1.5)
    write_trace(tmp_path / "par", [toy_step()], norm=1.5 * (1 + 1e-12))
    report = compare(tmp_path / "ref", tmp_path / "par")
    assert (report.findings[0].component, report.findings[0].cause) == ("clipping", "wrong_norm")
    write_trace(tmp_path / "par", [toy_step()])
    assert "norm: step 0: not reported in the parallel run" in (
        compare(tmp_path / "ref", tmp_path / "par").why
    )


def test_different_facts_are_the_first_finding(tmp_path: Path) -> None:
    def options(lr: float, decay: float = 0.1) -> Any:
        names = list(dict.fromkeys(name for _, name in toy_step()))
        group = {"options": {"lr": lr, "weight_decay": decay}, "names": names}
        return [{"class": "AdamW", "groups": [group]}]

    facts = {"global_batch": 8, "num_microbatches": 1}
    write_trace(tmp_path / "ref", [toy_step()], facts=facts, optimizers=options(1e-3))
    facts = {"global_batch": 16, "num_microbatches": 4}
    write_trace(tmp_path / "par", [toy_step()], facts=facts, optimizers=options(2e-3))
    report = compare(tmp_path / "ref", tmp_path / "par")
    check_schema(report)
    assert report.verdict == "misaligned"
    assert [(f.component, f.cause, f.evidence["fact"]) for f in report.findings] == [
        ("config", "different_config", "global_batch"),
        ("config", "different_config", "optimizer lr"),
    ]
    assert report.findings[1].evidence["parameters"] == 3
    assert report.notes == ["num_microbatches: 1 in the reference, 4 in parallel"]


def test_truth_decides_in_low_precision(tmp_path: Path) -> None:
    exact = [toy_step()]
    low = {"compute_dtype": "float32"}
    write_trace(tmp_path / "truth", exact)
    start = {key: value.float().double() for key, value in toy_step().items()}
    write_trace(tmp_path / "truth", [{**start, **_only(exact[0], Kind.GRAD)}])
    single = {key: value.float() for key, value in start.items()}
    write_trace(tmp_path / "ref", [single], facts=low)
    write_trace(tmp_path / "par", [single], facts=low)
    report = compare(tmp_path / "ref", tmp_path / "par", truth=tmp_path / "truth")
    check_schema(report)
    assert (report.verdict, report.yardstick, report.dtype) == ("aligned", "truth", "float32")
    worse = {
        key: value * (1 + 2e-6) if key[0] == Kind.GRAD else value for key, value in single.items()
    }
    write_trace(tmp_path / "par", [worse], facts=low)
    report = compare(tmp_path / "ref", tmp_path / "par", truth=tmp_path / "truth")
    assert report.verdict == "misaligned"
    assert 10 < row(report, "grad", "embed.weight").eps < 30
    uncalibrated = compare(tmp_path / "ref", tmp_path / "par")
    assert uncalibrated.verdict == "aligned"
    assert "uncalibrated" in uncalibrated.why
    assert row(uncalibrated, "update", "embed.weight").budget_eps is None


@pytest.mark.parametrize(("off", "verdict"), [(1.0, "aligned"), (2.0, "misaligned")])
def test_a_square_may_be_off_by_twice_its_gradients_budget(
    tmp_path: Path, off: float, verdict: str
) -> None:
    """The reference's own square is exact by luck, its gradient is not."""

    def step(grad_eps: float, square_eps: float) -> dict[tuple[str, str], Tensor]:
        tensors = dict(start)
        for (kind, name), value in start.items():
            if kind == Kind.GRAD:
                generator = torch.Generator().manual_seed(1)
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                noise *= EPS["float32"] * value.norm() / (noise * value).norm()
                tensors[kind, name] = value * (1 + grad_eps * noise)
                tensors["moment:exp_avg_sq", name] = (
                    1e-3 * (value * (1 + square_eps / 2 * noise)).square()
                )
        return tensors

    start = {key: value.float().double() for key, value in toy_step().items()}
    low = {"compute_dtype": "float32"}

    def single(tensors: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        return {key: value.float() for key, value in tensors.items()}

    write_trace(tmp_path / "truth", [step(0, 0)])
    write_trace(tmp_path / "ref", [single(step(4, 0))], facts=low)
    write_trace(tmp_path / "par", [single(step(10, 20 * off))], facts=low)
    report = compare(tmp_path / "ref", tmp_path / "par", truth=tmp_path / "truth")
    assert report.verdict == verdict, report.why
    square = next(r for r in report.tensors if r.state == "exp_avg_sq")
    grad = row(report, "grad", square.name)
    assert grad.ok
    assert grad.budget_eps is not None
    assert square.budget_eps == pytest.approx(2 * grad.budget_eps)


def _only(step: dict[tuple[str, str], Tensor], kind: str) -> dict[tuple[str, str], Tensor]:
    return {key: value for key, value in step.items() if key[0] == kind}


def test_a_truth_that_is_none_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "ref", [toy_step()])
    with pytest.raises(ConfigError, match="is for runs in fp32 or bf16; this one is in fp64"):
        compare(tmp_path / "ref", tmp_path / "ref", truth=tmp_path / "ref")
    low = {"compute_dtype": "bfloat16"}
    write_trace(tmp_path / "low", [toy_step(dtype=torch.bfloat16)], facts=low)
    with pytest.raises(ConfigError, match=r"was computed in bfloat16\. Record the reference run"):
        compare(tmp_path / "low", tmp_path / "low", truth=tmp_path / "low")
    write_trace(tmp_path / "odd", [toy_step()], facts={"compute_dtype": "int8"})
    with pytest.raises(ConfigError, match="compute_dtype='int8' is not one of"):
        compare(tmp_path / "ref", tmp_path / "odd")


def test_traces_follow_the_shipped_schema(tmp_path: Path) -> None:
    folder = write_trace(
        tmp_path / "t", [toy_step()], mesh=MESH, placements=sharded, norm=float("inf")
    )
    schema = json.loads((SCHEMAS / "trace.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    files = sorted(folder.glob("*.json"))
    assert len(files) == 5
    for path in files:
        content = json.loads(path.read_text())
        validator.validate(content)
        content["version"] = 2
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(content)


def anonymous_bytes() -> int:
    """Return this process's memory that is not a mapped file."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    big = torch.randn(1000, 12_500, dtype=torch.float64)  # 100 MB on each side
    tensors = {(Kind.GRAD, "w"): big}
    for name, mesh in (("ref", {}), ("par", {"fsdp": 2})):
        write_trace(
            tmp_path / name,
            [tensors],
            mesh=mesh,
            placements=lambda name: (Shard(1),) if name == "w" else (),
            what=("loss", "grads"),
        ) if mesh else write_trace(tmp_path / name, [tensors], what=("loss", "grads"))
    del big, tensors
    compare(tmp_path / "ref", tmp_path / "par")  # libraries' own buffers
    before, peak, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    report = compare(tmp_path / "ref", tmp_path / "par")
    done.set()
    watcher.join()
    assert report.verdict == "aligned"
    assert report.coverage.elements == 12_500_000
    assert peak > 0
    assert peak - before < 80e6
