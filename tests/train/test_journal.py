from __future__ import annotations

from typing import Any

import pytest

from paralign.train import journal
from paralign.train.journal import Journal
from paralign.train.metrics import Metrics, read_metrics
from tests.parity import make_config
from tests.train.test_metrics import LINE


class Kept:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, float]] = []
        self.is_failed: bool | None = None

    def write(self, numbers: Any, step: int) -> None:
        self.lines.append((step, numbers["loss"]))

    def close(self, *, is_failed: bool) -> None:
        self.is_failed = is_failed


def test_a_line_goes_to_the_file_and_to_every_tracker(tmp_path, monkeypatch):
    kept = [Kept(), Kept()]
    asked: list[int] = []

    def trackers(config: Any, folder: Any, *, step: int) -> list[Kept]:
        asked.append(step)
        return kept

    monkeypatch.setattr(journal, "open_trackers", trackers)
    config = make_config()
    with Journal(config, tmp_path, step=7, is_writer=True) as written:
        written.write(Metrics(**LINE))
    assert asked == [7]
    assert [line["step"] for line in read_metrics(tmp_path)] == [10]
    assert all(one.lines == [(10, 2.5)] and one.is_failed is False for one in kept)
    with pytest.raises(RuntimeError), Journal(config, tmp_path, step=10, is_writer=True):
        raise RuntimeError
    assert all(one.is_failed for one in kept)


def test_other_ranks_write_nothing(tmp_path):
    config = make_config(metrics={"wandb": "demo"})  # which is not even looked for
    with Journal(config, tmp_path / "run", step=0, is_writer=False) as silent:
        silent.write(Metrics(**LINE))
    assert not (tmp_path / "run").exists()
