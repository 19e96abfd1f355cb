from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paralign.config import extras
from paralign.errors import ConfigError
from paralign.train.metrics import ExpertLoad, Metrics, Validation
from paralign.train.trackers import TensorBoard, numbers_of, open_trackers
from tests.parity import make_config
from tests.train.test_metrics import LINE

EventAccumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator"
).EventAccumulator


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows of a run: tag -> steps and values."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def test_numbers_of_a_line_are_named_by_where_they_stand():
    load = ExpertLoad(worst=1.5, layer="layers.1.ffn.router", mean=1.25)
    numbers = numbers_of(Metrics(**{**LINE, "expert_load": load}))
    assert numbers["loss_parts/cross_entropy"] == 2.5
    assert numbers["expert_load/worst"] == 1.5
    assert not {"step", "utilisation", "expert_load/layer"} & numbers.keys()
    line = Validation(step=3, validation_loss=2.0, validation_tokens=7)
    assert numbers_of(line) == {"validation_loss": 2.0, "validation_tokens": 7}


def test_lines_of_steps_that_were_lost_are_hidden(tmp_path):
    first = TensorBoard(tmp_path, step=0)
    for step in (1, 2, 3):
        first.write({"loss": float(step)}, step)
    first.close(is_failed=True)
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}
    again = TensorBoard(tmp_path, step=1)
    again.write({"loss": 0.5}, 2)
    again.close(is_failed=False)
    assert scalars(tmp_path) == {"loss": [(1, 1.0), (2, 0.5)]}


class FakeError(Exception):
    pass


class FakeRun:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.ended: int | None = None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch) -> Any:
    """A stand-in for the package, which is large; the last test has the real one."""
    module: Any = ModuleType("wandb")
    module.calls = []
    module.Error = FakeError
    module.Settings = SimpleNamespace
    module.run = run = FakeRun()

    def init(**options: Any) -> FakeRun:
        module.calls.append(options)
        return run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(extras, "find_spec", lambda name: object())
    return module


CONFIG: dict[str, Any] = {"metrics": {"wandb": "demo", "wandb_mode": "offline"}}


def test_a_run_of_wandb_goes_on_as_the_same_run(tmp_path, wandb):
    config = make_config(**CONFIG)
    for step in (1, 2):
        [tracker] = open_trackers(config, tmp_path / "run", step=step)
        tracker.write({"loss": 2.0}, step)
        tracker.close(is_failed=step == 1)
        assert wandb.run.ended == int(step == 1)
    first, second = wandb.calls
    assert first["id"] == second["id"]
    assert len(first["id"]) == 16
    assert (first["project"], first["name"], first["mode"]) == ("demo", "run", "offline")
    assert first["resume"] == "allow"
    assert first["config"] == config.model_dump(mode="json")
    assert wandb.run.lines == [(1, {"loss": 2.0}), (2, {"loss": 2.0})]
    [other] = open_trackers(config, tmp_path / "other", step=0)
    other.close(is_failed=False)
    assert wandb.calls[-1]["id"] != first["id"]


def test_what_wandb_refuses_is_said_with_a_way_out(tmp_path, wandb):
    def init(**options: Any) -> None:
        raise FakeError("No API key configured.")

    wandb.init = init
    with pytest.raises(ConfigError, match=r"No API key.*or use metrics\.wandb_mode=offline"):
        open_trackers(make_config(**CONFIG), tmp_path, step=0)


def test_a_damaged_run_file_is_named(tmp_path, wandb):
    (tmp_path / "wandb.json").write_text(json.dumps(["id"]))
    with pytest.raises(ConfigError, match=r"wandb\.json cannot be read: .* Remove it"):
        open_trackers(make_config(**CONFIG), tmp_path, step=0)


def test_a_missing_package_is_named_before_anything_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    config = make_config(metrics={"tensorboard": True})
    with pytest.raises(ConfigError, match=r"pip install 'paralign\[tensorboard\]'"):
        open_trackers(config, tmp_path, step=0)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.long
def test_the_real_wandb_takes_the_lines(tmp_path):
    pytest.importorskip("wandb")
    for step in (1, 2):
        [tracker] = open_trackers(make_config(**CONFIG), tmp_path, step=step)
        tracker.write({"loss": 2.0}, step)
        tracker.close(is_failed=False)
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    kept = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert len(runs) == 2
    assert all(path.name.endswith(kept) for path in runs)
    assert all(next(iter(path.glob("*.wandb"))).stat().st_size > 0 for path in runs)
