from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paralign.align import compare
from tests.align.explain.scene import Run, Scene, Tensors, write

ROWS, LENGTH = 4, 8
MESH = {"dp": 2, "cp": 2}


def batch() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 500, (ROWS, LENGTH + 1), generator=generator)
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    return {"tokens": text[:, :-1].clone(), "labels": text[:, 1:].clone(), "positions": positions}


def share(at: tuple[int, ...]) -> Tensors:
    """Return the rows and the slice of a rank at ``(dp, cp)``."""
    rows = slice(2 * at[0], 2 * at[0] + 2)
    columns = slice(4 * at[1], 4 * at[1] + 4)
    return {name: tensor[rows, columns].clone() for name, tensor in batch().items()}


def explain(tmp_path: Path, change, whole: Tensors | None = None):
    """Compare with a run whose ranks are fed ``change((dp, cp), right share)``."""
    scene = Scene(MESH)
    reference = scene.rank()
    reference.inputs, reference.tokens = [whole or batch()], ROWS * LENGTH
    write(tmp_path / "ref", [reference], {})
    runs: list[Run] = []
    for at in scene.coordinates:
        # Other inputs give other gradients; what they are is not the point here.
        run = scene.rank(Scene(MESH, seed=5).right())
        run.inputs, run.tokens = [change(at, share(at))], ROWS * LENGTH
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]


def replaced(fed: Tensors, **new: Tensor) -> Tensors:
    return {**fed, **new}


def test_equal_samples_on_dp(tmp_path: Path) -> None:
    finding = explain(tmp_path, lambda at, fed: share((0, at[1])))
    assert (finding.component, finding.cause) == ("data", "different_data")
    assert finding.axes == ["dp"]


def blank_second_halves() -> Tensors:
    """Return a batch of which cp rank 1 cannot say which rows it holds."""
    whole = batch()
    whole["tokens"][:, 4:] = whole["labels"][:, 3:] = 7
    return whole


def test_slices_that_read_alike_may_be_the_same_samples(tmp_path: Path) -> None:
    whole = blank_second_halves()

    def change(at, fed):
        rows, columns = slice(0, 2), slice(4 * at[1], 4 * at[1] + 4)  # rows 0 and 1 on every rank
        return {name: tensor[rows, columns].clone() for name, tensor in whole.items()}

    finding = explain(tmp_path, change, whole=whole)
    assert (finding.cause, finding.axes) == ("different_data", ["dp"])  # and not cp


def test_slices_that_read_alike_are_not_held_against_right_rows(tmp_path: Path) -> None:
    """Rows 0 and 2 end alike, and cp rank 1 alone cannot say which of them it holds."""
    whole = batch()
    whole["tokens"][[0, 2], 4:] = whole["labels"][[0, 2], 3:] = 7

    def right(at, fed):
        rows, columns = [[1, 0], [2, 3]][at[0]], slice(4 * at[1], 4 * at[1] + 4)
        return {name: tensor[rows, columns].clone() for name, tensor in whole.items()}

    finding = explain(tmp_path, right, whole=whole)
    assert finding.component == "backward"  # where the gradients are made other ones


def test_what_was_told_of_slices_that_read_alike_makes_them_no_other_samples(
    tmp_path: Path,
) -> None:
    """Rows 0 and 1 come twice, and are told as 2 and 3: on cp rank 1 their blanks may be these."""
    whole = blank_second_halves()
    scene = Scene({"cp": 2})
    reference = scene.rank()
    reference.inputs, reference.samples = [whole], [(0, 1, 2, 3)]
    write(tmp_path / "ref", [reference], {})
    runs = [scene.rank(Scene({"cp": 2}, seed=5).right()) for _ in range(2)]
    for rank, run in enumerate(runs):
        columns = slice(4 * rank, 4 * rank + 4)
        run.inputs = [{name: t[:2, columns].clone() for name, t in whole.items()}] * 2
        run.samples = [(0, 1), (2, 3)]
    write(tmp_path / "par", runs, scene.mesh)
    finding = compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True).findings[0]
    assert (finding.cause, finding.axes) == ("different_data", [])
    assert finding.evidence["rank"] == 0  # one rank's micro-batches repeat


def test_other_samples_on_a_cp_rank(tmp_path: Path) -> None:
    def change(at, fed):
        return {n: t.roll(1, 0) for n, t in fed.items()} if at[1] else fed

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("different_data", ["cp"])


def test_whole_sequences_on_cp(tmp_path: Path) -> None:
    def change(at, fed):
        return {n: t[2 * at[0] : 2 * at[0] + 2].clone() for n, t in batch().items()}

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("full_sequence", ["cp"])


def test_rows_that_are_nowhere(tmp_path: Path) -> None:
    finding = explain(
        tmp_path,
        lambda at, fed: replaced(fed, tokens=fed["tokens"] + 500) if at[0] == 1 else fed,
    )
    assert (finding.cause, finding.axes) == ("different_data", ["dp"])
    assert finding.evidence["ranks"] == [2, 3]


def test_positions_that_start_again(tmp_path: Path) -> None:
    positions = torch.arange(4).expand(2, 4).contiguous()
    finding = explain(tmp_path, lambda at, fed: replaced(fed, positions=positions))
    assert (finding.component, finding.cause) == ("data", "mask_or_positions")
    assert finding.axes == ["cp"]


def test_slices_under_other_positions(tmp_path: Path) -> None:
    def change(at, fed):
        other = share((at[0], 1 - at[1]))
        return replaced(fed, tokens=other["tokens"], labels=other["labels"])

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("permuted_shards", ["cp"])


def test_labels_shifted_after_the_split(tmp_path: Path) -> None:
    def change(at, fed):
        late = torch.full_like(fed["labels"], -100)
        late[:, :-1] = fed["tokens"][:, 1:]
        return replaced(fed, labels=late)

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("label_shift", ["cp"])


def test_labels_shifted_twice(tmp_path: Path) -> None:
    def change(at, fed):
        again = torch.full_like(fed["labels"], -100)
        again[:, :-1] = fed["labels"][:, 1:]
        return replaced(fed, labels=again)

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("label_shift", [])


@pytest.mark.parametrize("coordinate", [0, 1])
def test_labels_of_other_rows(tmp_path: Path, coordinate: int) -> None:
    def change(at, fed):
        return replaced(fed, labels=fed["labels"].roll(1, 0)) if at[0] == coordinate else fed

    finding = explain(tmp_path, change)
    assert (finding.cause, finding.axes) == ("different_data", ["dp"])
