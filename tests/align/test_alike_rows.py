from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paralign.align import Report, compare
from tests.align.explain.scene import Scene, Tensors, write
from tests.align.explain.test_data import LENGTH, ROWS, batch

MESH = {"dp": 2, "cp": 2}


def blank(rows: list[int], places: slice) -> Tensors:
    """Return a batch in which some rows hold nothing but padding at some places."""
    whole = batch()
    whole["tokens"][rows, places] = 7
    return whole


def judged(tmp_path: Path, whole: Tensors, dealt: list[list[int]], cut: list[list[int]]) -> Report:
    """Compare with a right run whose dp ranks hold the rows ``dealt``, cp ranks the places."""
    scene = Scene(MESH)
    reference = scene.rank()
    reference.inputs, reference.tokens = [whole], ROWS * LENGTH
    reference.outputs = [{"embed": whole["tokens"][..., None].double() + torch.arange(3)}]
    write(tmp_path / "ref", [reference], {})
    runs = []
    for dp, cp in scene.coordinates:
        run = scene.rank()
        rows, places = torch.tensor(dealt[dp])[:, None], torch.tensor(cut[cp])
        run.tokens = ROWS * LENGTH
        run.inputs = [{"tokens": whole["tokens"][rows, places]}]
        run.outputs = [{"embed": reference.outputs[0]["embed"][rows, places]}]
        runs.append(run)
    write(tmp_path / "par", runs, MESH)
    return compare(tmp_path / "ref", tmp_path / "par", allow_skipped=True)


SLICES = [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("rows", "places"),
    [
        ([0, 1, 2, 3], slice(4, None)),  # what cp rank 0 holds tells
        ([0, 1, 2, 3], slice(0, 4)),
        ([1, 2], slice(4, None)),
    ],
)
@pytest.mark.parametrize("dealt", [[[0, 1], [2, 3]], [[3, 0], [1, 2]]])
def test_padded_slices_of_a_right_run_are_where_their_peers_rows_are(
    tmp_path: Path, rows: list[int], places: slice, dealt: list[list[int]]
) -> None:
    report = judged(tmp_path, blank(rows, places), dealt, SLICES)
    assert report.verdict == "aligned", report.why
    assert [row.rel_l2 for row in report.tensors if row.kind in ("input", "output")] == [0.0] * 2


def test_slices_that_are_alike_in_other_rows_each_tell_together(tmp_path: Path) -> None:
    """Row 3 begins as row 0 does and ends as row 1 does; no slice alone is its own."""
    whole = batch()
    whole["tokens"][3, :4] = whole["tokens"][0, :4]
    whole["tokens"][3, 4:] = whole["tokens"][1, 4:]
    report = judged(tmp_path, whole, [[0, 1], [3, 2]], SLICES)
    assert report.verdict == "aligned", report.why


def test_a_row_that_is_left_out_is_still_missed(tmp_path: Path) -> None:
    report = judged(tmp_path, blank([0, 1, 2, 3], slice(4, None)), [[0, 1], [0, 1]], SLICES)
    assert report.verdict == "misaligned"
    assert "input tokens" in report.why
