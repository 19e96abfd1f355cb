from __future__ import annotations

import gc
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paralign.errors import ConfigError, TrainingError
from paralign.launch import report_event, run_ranks
from paralign.train.loop import Ended, run_training
from paralign.train.metrics import read_metrics
from tests.equivalence.test_moe import MODELS
from tests.train.runs import newest, run, tensors_in, training_config, worst

pytestmark = pytest.mark.ranks

MESHES = [{"pp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2}]  # ten are in tests/equivalence


def test_a_run_on_any_mesh_is_the_run_on_one_rank(tmp_path):
    alone = training_config(tmp_path / "alone")
    run(alone)
    expected = tensors_in(newest(alone))
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in expected)
    lines = read_metrics(tmp_path / "alone")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["norm"] > 0.5 for line in lines)  # so that clipping is part of the proof
    for number, mesh in enumerate(MESHES):
        config = training_config(tmp_path / str(number), mesh=mesh)
        run(config)
        assert worst(tensors_in(newest(config)), expected) <= 1e-12, mesh
        for line, other in zip(read_metrics(tmp_path / str(number)), lines, strict=True):
            assert line["num_tokens"] == other["num_tokens"]
            assert abs(line["loss"] - other["loss"]) <= 1e-13 * other["loss"]


EXPERTS = {
    "model": MODELS["pangu_moe"],
    "optimizer": {"lr": 3e-3, "clip": 0.05, "decay": "matrices"},
}


@pytest.mark.long
def test_experts_and_router_biases_are_trained_saved_and_loaded_on_any_mesh(tmp_path):
    alone = training_config(tmp_path / "alone", **EXPERTS)
    run(alone)
    expected = tensors_in(newest(alone))
    biases = [name for name in expected if name.endswith("router.bias")]
    assert biases
    assert any(name.startswith("optimizer.exp_avg.") and ".experts." in name for name in expected)
    spread = {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}
    first = training_config(tmp_path / "two", mesh=spread, train={"steps": 2}, **EXPERTS)
    run(first)
    second = training_config(tmp_path / "two", mesh={"dp_shard": 2, "cp": 2, "ep": 2}, **EXPERTS)
    _, said = run(second)
    assert "going on from" in said[0]
    ours = tensors_in(newest(second))
    assert all(torch.equal(ours[name], expected[name]) for name in biases)
    # A softmax is blind to what a bias adds to all keys alike: that part of it has a gradient of
    # zero in theory, and Adam moves it by rounding, on one rank with other micro-batches as well.
    blind = {name for name in expected if re.fullmatch(r"layers.*kv_up\.bias", name)}
    assert len(blind) == 4
    assert (
        worst(*({n: t for n, t in side.items() if n not in blind} for side in (ours, expected)))
        <= 1e-12
    )
    assert all(line["loss_parts"]["balance"] > 0 for line in read_metrics(tmp_path / "two"))


@pytest.mark.long
def test_bfloat16_keeps_float32_weights_and_goes_on_bitwise(tmp_path):
    low = {
        "precision": {"compute": "bfloat16", "reduce": "float32", "residual": "float32"},
        "pipeline": {"schedule": "1F1B"},
        "mesh": {"pp": 2, "dp_shard": 2},
    }
    once = training_config(tmp_path / "once", **low)
    run(once)
    run(training_config(tmp_path / "twice", train={"steps": 2}, **low))
    run(training_config(tmp_path / "twice", **low))
    ours, theirs = (tensors_in(newest(training_config(tmp_path / n))) for n in ("twice", "once"))
    assert {tensor.dtype for tensor in theirs.values()} == {torch.float32}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    losses = [line["loss"] for line in read_metrics(tmp_path / "once")]
    exact = training_config(tmp_path / "exact")
    run(exact)
    gaps = [
        abs(loss - line["loss"]) / line["loss"]
        for loss, line in zip(losses, read_metrics(tmp_path / "exact"), strict=True)
    ]
    assert 1e-8 < max(gaps) < 1e-2


def test_accumulation_is_one_larger_batch(tmp_path):
    model = {"dropout": 0.1}  # which drops by a row's number in the run
    whole = training_config(tmp_path / "whole", model=model, batch={"global_batch": 16})
    parts = training_config(
        tmp_path / "parts", model=model, train={"accumulate": 2}, mesh={"dp_shard": 2}
    )
    run(whole)
    run(parts)
    assert worst(tensors_in(newest(parts)), tensors_in(newest(whole))) <= 1e-12


def test_a_run_in_two_parts_is_bitwise_the_run_in_one(tmp_path):
    mesh = {"pp": 2, "dp_shard": 2}
    model = {"tie_embeddings": True, "dropout": 0.1}
    once = training_config(tmp_path / "once", mesh=mesh, model=model)
    run(once)
    first = training_config(tmp_path / "twice", mesh=mesh, model=model, train={"steps": 2})
    [end, *_], _ = run(first)
    assert end == Ended(step=2, is_complete=True, loss=end.loss)
    second = training_config(tmp_path / "twice", mesh=mesh, model=model)
    _, said = run(second)
    assert "going on from" in said[0]
    ours, theirs = tensors_in(newest(second)), tensors_in(newest(once))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [line["loss"] for line in read_metrics(tmp_path / "twice")] == [
        line["loss"] for line in read_metrics(tmp_path / "once")
    ]


@pytest.mark.parametrize(
    "mesh",
    [
        {},
        pytest.param({"cp": 2, "pp": 2}, marks=pytest.mark.long),
        pytest.param({"tp": 2}, marks=pytest.mark.long),
        pytest.param({"dp_shard": 4}, marks=pytest.mark.long),
        pytest.param({"dp_replicate": 2, "cp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_another_mesh_goes_on_with_the_same_bits(tmp_path, mesh):
    model = {"tie_embeddings": True, "dropout": 0.1}
    before = training_config(
        tmp_path, mesh={"pp": 2, "dp_shard": 2}, model=model, train={"steps": 2}
    )
    run(before)
    saved = tensors_in(newest(before))
    again = training_config(tmp_path, mesh=mesh, model=model, train={"steps": 2, "keep": 5})
    [end, *_], _ = run(again)
    assert end.loss is None and end.step == 2  # nothing left to do: nothing is written again
    more = training_config(tmp_path, mesh=mesh, model=model, train={"steps": 3})
    run(more)
    alone = training_config(tmp_path / "alone", model=model, train={"steps": 3})
    run(alone)
    assert worst(tensors_in(newest(more)), tensors_in(newest(alone))) <= 1e-12
    assert saved.keys() == tensors_in(newest(more)).keys()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(training_config(tmp_path, train={"steps": 2}))
    other = training_config(
        tmp_path, train={"steps": 2, "seed": 1}, optimizer={"lr": 1e-3}, batch={"seq_len": 8}
    )
    with pytest.raises(ConfigError) as error:
        run(other)
    text = str(error.value)
    for said in ("batch.seq_len was 16 and is 8", "optimizer.lr", "train.seed was 0 and is 1"):
        assert said in text
    assert "set train.dir to a new folder" in text


def _train_with_a_bad_gradient(config) -> Ended:
    from paralign.program import Program

    step, calls = Program.step, []

    def poisoned(self, batch, **options):
        loss = step(self, batch, **options)
        calls.append(1)
        named = dict(self.named_parameters())
        if len(calls) == 2 and dist.get_rank() == 1:
            named["layers.1.ffn.up.weight"].grad.to_local()[0, 0] = float("nan")
        return loss

    Program.step = poisoned  # type: ignore[method-assign]
    return run_training(config, report_event)


def test_a_bad_gradient_is_named_and_nothing_has_moved(tmp_path):
    config = training_config(tmp_path, mesh={"dp_shard": 2}, train={"save_every": 1})
    with pytest.raises(TrainingError) as error:
        run_ranks(_train_with_a_bad_gradient, 2, config, timeout=60)
    text = str(error.value)
    assert "step 2: the gradient norm is nan" in text
    assert "[rank 1: dp_shard=1] layers.1.ffn.up.weight: NaN" in text
    assert text.count("NaN") == 1  # clipping has not spread it
    assert newest(config).step == 1


def test_a_bad_gradient_can_be_left_out(tmp_path):
    train = {"on_nonfinite": "skip", "steps": 3}
    config = training_config(tmp_path, mesh={"dp_shard": 2}, train=train)
    said: list[str] = []
    run_ranks(
        _train_with_a_bad_gradient,
        2,
        config,
        timeout=60,
        on_event=lambda rank, text: said.append(text),
    )
    assert any("left out, as train.on_nonfinite=skip says" in text for text in said)
    state = newest(config).state()
    assert (state["step"], state["optimizer_steps"]) == (3, 2)
    assert all(torch.isfinite(tensor).all() for tensor in tensors_in(newest(config)).values())


def test_a_signal_ends_the_run_with_a_checkpoint(tmp_path):
    config = training_config(tmp_path, mesh={"dp_shard": 2}, train={"steps": 100_000})

    def heard(rank: int, text: str) -> None:
        if text.startswith("step 2/"):
            os.kill(os.getpid(), signal.SIGTERM)  # what a cluster does to the command

    from paralign.train.loop import run_local_rank

    ends = run_ranks(
        run_local_rank, 2, config, timeout=60, on_event=heard, forward=(signal.SIGTERM,)
    )
    assert len({end.step for end in ends}) == 1
    assert not ends[0].is_complete
    assert newest(config).step == ends[0].step
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _count_collections(config) -> int:
    counts = []
    gc.callbacks.append(lambda phase, info: counts.append(phase) if phase == "start" else None)
    run_training(config, lambda text: None)
    assert gc.isenabled()
    return len([phase for phase in counts if phase == "start"])


def test_garbage_is_collected_when_the_config_says(tmp_path):
    def collections(name: str, every: int) -> int:
        train = {"steps": 6, "collect_garbage_every": every, "log_every": 6}
        [number] = run_ranks(
            _count_collections, 1, training_config(tmp_path / name, train=train), timeout=60
        )
        return number

    often, seldom = collections("often", 1), collections("seldom", 3)
    assert often - seldom == 4


def test_lines_of_steps_that_were_lost_are_removed(tmp_path):
    config = training_config(tmp_path, train={"steps": 2})
    run(config)
    path = Path(tmp_path) / "metrics.jsonl"
    lost = json.dumps({"step": 3, "loss": 0.0})
    path.write_text(path.read_text() + lost + '\n{"step": 4, "lo')  # killed within a line
    run(training_config(tmp_path, train={"steps": 3}))
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[-1]["loss"] > 0
