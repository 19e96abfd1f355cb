from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paralign.align import compare
from paralign.align.verdict import Finding
from tests.align.explain.scene import Run, Scene, write
from tests.align.explain.test_data import MESH, batch, share

FEATURES = 8


def output(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((4, 8, FEATURES), generator=generator, dtype=torch.float64)


def explain(tmp_path: Path, change):
    """Compare with a run whose module ``b`` returns ``change(right)``; ``a`` is right."""
    scene = Scene(MESH)
    reference = scene.rank()
    reference.inputs = [batch()]
    reference.outputs = [{"a": output(1), "b": output(2), "c": output(3)}]
    write(tmp_path / "ref", [reference], {})
    runs: list[Run] = []
    wrong = change(output(2))
    for at in scene.coordinates:
        run = scene.rank(Scene(MESH, seed=5).right())
        run.inputs = [share(at)]
        rows, columns = slice(2 * at[0], 2 * at[0] + 2), slice(4 * at[1], 4 * at[1] + 4)
        both = {"a": output(1), "b": wrong, "c": output(3) + wrong.sum()}
        run.outputs = [{n: t[rows, columns].contiguous() for n, t in both.items()}]
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    (finding, *_) = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings
    assert finding.component == "forward"
    assert finding.tensor == "b"
    return finding


def dropped(x: Tensor) -> Tensor:
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) > 0.1
    return x * mask / 0.9


def per_token(x: Tensor) -> Tensor:
    return x * (1 + 0.1 * torch.arange(8).double())[None, :, None]


def after(x: Tensor, first: int, last: int | None = None) -> Tensor:
    """Return ``x`` with everything wrong from one position to another."""
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(6), dtype=x.dtype)
    wrong = x.clone()
    wrong[:, first:last] += noise[:, first:last]
    return wrong


@pytest.mark.parametrize(
    ("change", "cause", "axes"),
    [
        (lambda x: 2 * x, "constant_factor", []),
        (lambda x: x.bfloat16().double(), "precision", []),
        (dropped, "rng", []),
        (per_token, "different_config", []),
        (lambda x: x * (torch.arange(FEATURES) != 3), "missing_contribution", []),  # no dropout
        (lambda x: x.flip(2), "permuted_shards", ["cp"]),
        (lambda x: output(3), "wrong_layer", []),
        (lambda x: after(x, 4), "mask_or_positions", ["cp"]),
        (lambda x: after(x, 0, 7), "mask_or_positions", []),
        (lambda x: after(x, 1), "wrong_axis", ["cp"]),
        (lambda x: after(x, 0), "unknown", []),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_first_output_that_is_off(tmp_path: Path, change, cause: str, axes: list[str]) -> None:
    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == (cause, axes)


def lost(x: Tensor, rows: slice, columns: slice) -> Tensor:
    wrong = x.clone()
    wrong[rows, columns] = 0
    return wrong


@pytest.mark.parametrize(
    ("columns", "cause", "axes"),
    [(slice(4, 8), "single_rank", []), (slice(None), "missing_contribution", ["dp"])],
)
def test_zeros_on_one_rank_are_that_ranks_and_on_several_their_axes(
    tmp_path: Path, columns: slice, cause: str, axes: list[str]
) -> None:
    finding = explain(tmp_path, lambda x: lost(x, slice(2, 4), columns))
    assert (finding.cause, finding.axes) == (cause, axes)


@pytest.mark.parametrize(
    ("name", "change", "cause", "axes"),
    [
        ("b", lambda x: after(x, 0), "unknown", ["pp"]),
        ("c", lambda x: after(x, 0), "unknown", []),
        ("b", lambda x: 2 * x, "constant_factor", ["pp"]),
        ("b", per_token, "different_config", []),  # whatever was sent to it
    ],
)
def test_the_first_output_of_a_later_stage_points_at_what_was_sent(
    tmp_path: Path, name: str, change, cause: str, axes: list[str]
) -> None:
    scene = Scene({"pp": 2})
    right = {"a": output(1), "b": output(2), "c": output(3)}
    made = {**right, name: change(right[name])}
    reference, *runs = scene.rank(), scene.rank(), scene.rank()
    reference.inputs, reference.outputs = [batch()], [right]
    runs[0].inputs = [batch()]
    for run, names in zip(runs, ("a", "bc"), strict=True):
        run.outputs = [{n: made[n] for n in names}]
        run.loss += 0.1  # so that what differs is not without effect
    write(tmp_path / "ref", [reference], {})
    write(tmp_path / "par", runs, scene.mesh)
    finding = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]
    assert (finding.tensor, finding.cause, finding.axes) == (name, cause, axes)


@pytest.mark.parametrize(("alike", "cause"), [(True, "stale"), (False, "permuted_shards")])
def test_rows_of_an_own_micro_batch_are_not_taken_for_another_ranks(
    tmp_path: Path, alike: bool, cause: str
) -> None:
    """dp rank 1 returns row 3 for row 2, or row 0, which is rank 0's; row 0 may be equal to row 3.

    A sample that comes twice in a batch gives the same output on two ranks.
    """
    scene = Scene({"dp": 2})
    right = output(2)
    if alike:
        right[0] = right[3]
    made = right.clone()
    made[2] = right[0]
    reference = scene.rank()
    reference.inputs, reference.outputs = [batch()], [{"b": right}]
    runs = [scene.rank(Scene({"dp": 2}, seed=5).right()) for _ in range(2)]
    for rank, run in enumerate(runs):
        rows = [slice(row, row + 1) for row in (2 * rank, 2 * rank + 1)]
        run.inputs = [{name: t[row].clone() for name, t in batch().items()} for row in rows]
        run.outputs = [{"b": made[row].contiguous()} for row in rows]
    write(tmp_path / "ref", [reference], {})
    write(tmp_path / "par", runs, scene.mesh)
    finding = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]
    assert (finding.component, finding.cause) == ("forward", cause)


def test_one_rank_that_differs_where_others_run_the_same_module(tmp_path: Path) -> None:
    scene = Scene({"dp": 2})
    reference = scene.rank()
    reference.inputs, reference.outputs = [batch()], [{"b": output(2)}]
    runs = [scene.rank(Scene({"dp": 2}, seed=5).right()) for _ in range(2)]
    for rank, (run, made) in enumerate(zip(runs, (output(2), after(output(2), 0)), strict=True)):
        rows = slice(2 * rank, 2 * rank + 2)
        run.inputs = [{name: tensor[rows].clone() for name, tensor in batch().items()}]
        run.outputs = [{"b": made[rows].contiguous()}]
    write(tmp_path / "ref", [reference], {})
    write(tmp_path / "par", runs, scene.mesh)
    finding = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]
    assert (finding.component, finding.cause) == ("forward", "single_rank")
    assert finding.evidence["ranks"] == [1]


def explain_over_tp(tmp_path: Path, outputs: list[Tensor], **changed) -> list[Finding]:
    """Compare with a run whose two tp ranks return these for ``b``, and differ in all gradients."""
    scene = Scene({"tp": 2})
    reference = scene.rank()
    reference.inputs, reference.outputs = [batch()], [{"b": output(2)}]
    runs = [scene.rank(Scene({"tp": 2}, seed=5 + rank).right()) for rank in range(2)]
    for run, made in zip(runs, outputs, strict=True):
        run.inputs, run.outputs = [{**batch(), **changed}], [{"b": made}]
    write(tmp_path / "ref", [reference], {})
    write(tmp_path / "par", runs, scene.mesh)
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings


def test_gradients_that_differ_as_outputs_do_are_no_cause_of_their_own(tmp_path: Path) -> None:
    part = output(7)
    (finding,) = explain_over_tp(tmp_path, [output(2) - part, part])
    assert (finding.component, finding.cause) == ("forward", "missing_reduction")
    assert finding.axes == ["tp"]


def test_a_replica_that_is_off_is_not_looked_for_at_other_tokens(tmp_path: Path) -> None:
    finding = explain_over_tp(tmp_path, [output(2), after(output(2), 0)])[0]
    assert (finding.cause, finding.axes) == ("missing_reduction", ["tp"])
    assert any("forward/rng" in candidate for candidate in finding.candidates)


def test_outputs_of_wrong_inputs_are_no_cause_of_their_own(tmp_path: Path) -> None:
    both = [after(output(2), 0)] * 2
    found = explain_over_tp(tmp_path, both, positions=batch()["positions"] + 1)
    assert found[0].component == "data"
    assert "forward" not in {finding.component for finding in found}
