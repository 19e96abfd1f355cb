from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paralign.align import Report, compare
from paralign.align.tensor_entry import Kind
from paralign.align.verdict import TensorRow
from tests.align.explain.scene import Scene, write
from tests.align.explain.test_data import batch
from tests.align.judging import check_schema
from tests.align.nets import build, train
from tests.align.toys import batches


def judged(tmp_path: Path) -> Report:
    report = compare(tmp_path / "ref", tmp_path / "par")
    check_schema(report)
    return report


def rows(report: Report, *kinds: str) -> dict[str, TensorRow]:
    return {row.name: row for row in report.tensors if row.kind in kinds}


def changed(row: int = 3, column: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Return the usual batch with one other token."""
    [(tokens, labels)] = batches(1)
    tokens[row, column] = (tokens[row, column] + 1) % 11
    return [(tokens, labels)]


def test_rows_cut_differently_are_compared_like_with_like(tmp_path: Path) -> None:
    train(tmp_path / "ref", build(), micro_batches=1, told=True)
    train(tmp_path / "par", build(), micro_batches=4, told=True)
    report = judged(tmp_path)
    assert report.verdict == "aligned", report.why
    assert list(rows(report, Kind.INPUT)) == ["tokens", "labels"]
    found = rows(report, Kind.OUTPUT)
    assert list(found)[:2] == ["embed", "blocks.0.up"]
    assert all(row.ok and row.budget_eps == 100 for row in found.values())
    assert report.notes == []


def test_kinds_come_in_causal_order(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", build())
    kinds = list(dict.fromkeys(row.kind for row in judged(tmp_path).tensors))
    assert kinds[:4] == [Kind.INPUT, Kind.PARAM, Kind.OUTPUT, "tokens"]
    assert kinds.index("loss") < kinds.index(Kind.OUTPUT_GRAD) < kinds.index(Kind.GRAD)


def test_later_steps_are_compared_with_their_own_tokens(tmp_path: Path) -> None:
    data = list(batches(2))
    train(tmp_path / "ref", build(), data=data, steps=2)
    train(tmp_path / "par", build(), data=data, steps=2, micro_batches=4)
    report = judged(tmp_path)
    assert report.verdict == "aligned", report.why
    assert {row.step for row in report.tensors if row.kind == Kind.OUTPUT} == {0, 1}


class Doubled(nn.Linear):
    """Returns twice what it should; whoever uses it knows that."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_differs_without_effect_is_listed_and_not_gated(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    model = build()
    down = Doubled(16, 8).double()
    down.load_state_dict(model.get_submodule("blocks.0.down").state_dict())
    model.blocks[0].down = down
    block: Any = model.blocks[0]

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(block.up(x))
        return x + block.down(h) / 2, h.mean(-1, keepdim=True)

    block.forward = forward
    train(tmp_path / "par", model)
    report = judged(tmp_path)
    assert report.verdict == "aligned", report.why
    odd = rows(report, Kind.OUTPUT)["blocks.0.down"]
    assert odd.budget_eps is None
    assert odd.scale == pytest.approx(2)
    assert any("differ, first output blocks.0.down" in note for note in report.notes)


def test_other_data_is_inconclusive(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    [(tokens, labels)] = batches(1)
    train(tmp_path / "par", build(), data=[((tokens + 1) % 11, labels)])
    report = judged(tmp_path)
    assert report.verdict == "inconclusive"
    assert "fed different data: at step 0 8 of 8 rows" in report.why
    assert not rows(report, Kind.INPUT)["tokens"].ok


def test_one_other_row_is_misaligned_and_the_rest_is_compared(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", build(), data=changed())
    report = judged(tmp_path)
    assert report.verdict == "misaligned"
    assert "input tokens" in report.why
    tokens = rows(report, Kind.INPUT)["tokens"]
    assert tokens.rel_l2 == pytest.approx(1 / 8)
    assert tokens.ranks_off == [0]
    assert rows(report, Kind.OUTPUT)["head"].ok  # of the rows that both have


def test_labels_that_are_shifted_are_seen_before_the_loss(tmp_path: Path) -> None:
    [(tokens, labels)] = batches(1)
    train(tmp_path / "ref", build(), told=True)
    train(tmp_path / "par", build(), told=True, data=[(tokens, labels.roll(1, dims=1))])
    report = judged(tmp_path)
    assert report.verdict == "misaligned"
    assert "input labels" in report.why
    assert rows(report, Kind.OUTPUT)["head"].ok
    assert not rows(report, Kind.OUTPUT_GRAD)["head"].ok


def test_a_run_that_recorded_no_tokens_is_named(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", build(), what=("loss", "params", "grads"))
    report = judged(tmp_path)
    assert report.verdict == "aligned"
    assert any("no tokens were recorded in the parallel run" in note for note in report.notes)


def test_a_module_that_one_run_lacks_is_named(tmp_path: Path) -> None:
    train(tmp_path / "ref", build())
    train(tmp_path / "par", build(), modules="b*")
    report = judged(tmp_path)
    assert report.verdict == "aligned"
    assert sum("not in the parallel run" in note for note in report.notes) == 2
    assert "embed" not in rows(report, Kind.OUTPUT)


def test_nan_is_out_of_budget(tmp_path: Path) -> None:
    model = build()
    model.norm.register_forward_hook(lambda module, args, out: out * float("nan"))
    train(tmp_path / "ref", build())
    train(tmp_path / "par", model)
    report = judged(tmp_path)
    assert report.verdict == "misaligned"
    found = rows(report, Kind.OUTPUT)
    assert found["blocks.1[0]"].ok
    assert not found["norm"].ok


def test_dims_of_equal_size_are_told_apart_by_the_other_run(tmp_path: Path) -> None:
    """A slice over cp has as many positions as there are heads; the whole sequence has more."""
    scene = Scene({"cp": 2})
    generator = torch.Generator().manual_seed(1)
    rows_heads_positions = torch.randn(4, 4, 8, 3, generator=generator, dtype=torch.float64)
    reference, runs = scene.rank(), [scene.rank(), scene.rank()]
    reference.inputs, reference.outputs = [batch()], [{"core": rows_heads_positions}]
    for rank, run in enumerate(runs):
        columns = slice(4 * rank, 4 * rank + 4)
        run.inputs = [{name: tensor[:, columns].clone() for name, tensor in batch().items()}]
        run.outputs = [{"core": rows_heads_positions[:, :, columns].contiguous()}]
    write(tmp_path / "ref", [reference], {}, token_dims=None)
    write(tmp_path / "par", runs, scene.mesh, token_dims=None)
    core = rows(judged(tmp_path), Kind.OUTPUT)["core"]
    assert (core.rel_l2, core.budget_eps) == (0.0, 100)
