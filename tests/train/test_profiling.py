from __future__ import annotations

import json

import pytest
import torch

from paralign.train.metrics import read_metrics
from tests.train.runs import newest, run, tensors_in, training_config
from tests.train.test_trackers import scalars

pytestmark = pytest.mark.ranks


def test_steps_are_traced_on_chosen_ranks_and_a_run_that_is_watched_is_bitwise_the_same(tmp_path):
    # Tied copies on two stages, and replicas: all that train.check_every looks at has copies.
    mesh, model = {"pp": 2, "dp_replicate": 2}, {"tie_embeddings": True}
    plain = training_config(tmp_path / "plain", mesh=mesh, model=model)
    run(plain)
    watched = training_config(
        tmp_path / "watched",
        mesh=mesh,
        model=model,
        train={"check_every": 1},
        profile={"first_step": 2, "steps": 2, "ranks": (0, 3)},
        metrics={"tensorboard": True, "peak_tflops": 1.0},
    )
    _, said = run(watched)
    folder = tmp_path / "watched" / "profile"
    names = ["rank-00000-steps-2-3.json", "rank-00003-steps-2-3.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert any(f"traced from step 2 on, {folder / names[0]}" in text for text in said)
    for name in names:
        events = json.loads((folder / name).read_text())["traceEvents"]
        found = {event.get("name") for event in events}
        assert {"step 2", "step 3"} <= found and "step 4" not in found
        assert any("gloo" in str(one) or "c10d" in str(one) for one in found)  # collectives as well

    ours, theirs = tensors_in(newest(watched)), tensors_in(newest(plain))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines, others = (read_metrics(tmp_path / name) for name in ("watched", "plain"))
    assert [line["loss"] for line in lines] == [line["loss"] for line in others]
    for line in lines:
        assert line["utilisation"] == pytest.approx(line["flops_per_s"] / 4e12)
        assert 0 <= line["pipeline_bubble"] < 1
        assert line["peak_memory"] > 2**20 and line["expert_load"] is None
    shown = scalars(tmp_path / "watched" / "tensorboard")
    assert [step for step, _ in shown["loss"]] == [line["step"] for line in lines]
    assert [loss for _, loss in shown["loss"]] == pytest.approx([line["loss"] for line in lines])
    assert shown.keys() >= {"norm", "lr", "tokens_per_s", "utilisation", "pipeline_bubble"}
