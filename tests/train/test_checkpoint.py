from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paralign.errors import TrainingError
from paralign.launch import run_ranks
from paralign.train.checkpoint import Checkpoints, find_checkpoints
from tests.train.runs import newest, run, tensors_in, training_config

pytestmark = pytest.mark.ranks


def test_only_the_newest_are_kept_and_nothing_is_left_over(tmp_path):
    config = training_config(tmp_path, train={"steps": 5, "save_every": 1, "keep": 2})
    run(config)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000005"]


def test_saving_in_the_background_holds_the_values_of_its_step(tmp_path):
    settings = {"steps": 4, "save_every": 1, "keep": 9}
    behind = training_config(tmp_path / "behind", train=settings | {"async_save": True})
    at_once = training_config(tmp_path / "at_once", train=settings | {"async_save": False})
    run(behind)
    run(at_once)
    pairs = [find_checkpoints(tmp_path / n / "checkpoints") for n in ("behind", "at_once")]
    assert [len(found) for found in pairs] == [4, 4]
    for ours, theirs in zip(*pairs, strict=True):
        one, other = tensors_in(ours), tensors_in(theirs)
        assert all(torch.equal(one[name], other[name]) for name in other)


def _damage(kind: str, path: Path) -> None:
    if kind == "missing":
        path.unlink()
    elif kind == "short":
        os.truncate(path, path.stat().st_size - 1)
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        pytest.param("missing", "cannot be read", marks=pytest.mark.long),
        pytest.param("short", "bytes instead of", marks=pytest.mark.long),
        ("flipped", "has changed"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, kind, said):
    mesh = {"dp_shard": 2}
    run(training_config(tmp_path, mesh=mesh, train={"steps": 2}))
    damaged = sorted(newest(training_config(tmp_path)).path.glob("shard-00002-*"))[-1]
    _damage(kind, damaged)
    with pytest.raises(TrainingError) as error:
        run(training_config(tmp_path, mesh=mesh, train={"steps": 3}))
    assert damaged.name in str(error.value)
    assert said in str(error.value)
    assert "Remove that folder to go on from the checkpoint before it" in str(error.value)


def test_a_damaged_state_is_said(tmp_path):
    run(training_config(tmp_path, train={"steps": 2}))
    (newest(training_config(tmp_path)).path / "state.json").write_text("{")
    with pytest.raises(TrainingError, match=r"is damaged: state\.json cannot be read"):
        run(training_config(tmp_path, train={"steps": 3}))


def _save_without_room(folder: str) -> str:
    from paralign.train import checkpoint

    saves = Checkpoints(Path(folder), keep=2, is_async=True)
    tensors = {"w": torch.ones(4), f"optimizer.m.{dist.get_rank()}": torch.ones(4)}
    saves.save(1, tensors, {})
    saves.wait()

    class Full(checkpoint._Writer):
        def write_data(self, plan, planner):
            if dist.get_rank() == 1:
                raise OSError(28, "No space left on device")
            return super().write_data(plan, planner)

    checkpoint._Writer = Full  # type: ignore[misc]
    saves.save(2, tensors, {})
    try:
        saves.wait()
    except TrainingError as error:
        return str(error)
    return ""


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    for text in run_ranks(_save_without_room, 2, str(tmp_path), timeout=60):
        assert "the checkpoint of step 2 could not be written" in text
        assert "rank 1: No space left on device" in text
        assert f"the last complete one is {tmp_path / 'step-00000001'}" in text
    [kept] = find_checkpoints(tmp_path)
    assert torch.equal(tensors_in(kept)["w"], torch.ones(4))


def test_a_checkpoint_that_is_being_written_is_not_one(tmp_path):
    run(training_config(tmp_path, train={"steps": 2}))
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-00000002", folder / ".step-00000003.partial")
    (folder / "step-9").mkdir()  # not a name of ours
    assert [found.step for found in find_checkpoints(folder)] == [2]
    assert find_checkpoints(tmp_path / "nowhere") == []
