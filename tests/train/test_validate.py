from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from paralign.config.run import RunConfig
from paralign.launch import run_ranks
from paralign.prove.reference import ReferenceStep
from paralign.train.build import (
    build_pieces,
    build_program,
    init_rule,
    initialise_whole,
    training_numerics,
)
from paralign.train.data import open_held_out
from paralign.train.loop import run_training
from paralign.train.metrics import read_metrics
from paralign.train.validate import validate
from tests.data.texts import write_documents
from tests.equivalence.test_moe import MODELS
from tests.train.runs import newest, run, tensors_in, training_config

pytestmark = pytest.mark.ranks

EXPERTS = {"model": MODELS["pangu_moe"], "optimizer": {"lr": 3e-3, "clip": 0.05}}


def validated(folder: Path, **sections: Any) -> RunConfig:
    """Return a run with held-out rows of unequal numbers of labels, and a last batch not full."""
    text = write_documents(folder / "text", 70, 9, 33, 41, 2)
    sections["validation"] = {"every": 2, "source": str(text)} | sections.get("validation", {})
    return training_config(folder, **sections)


def lines_of(config: RunConfig) -> list[dict[str, Any]]:
    lines = read_metrics(Path(config.train.dir))
    return [line for line in lines if "validation_loss" in line]


def losses_on_one_device(config: RunConfig) -> tuple[float, int]:
    """Return the loss of a new model on what is held out, from plain torch."""
    config = config.for_training()
    precision = training_numerics(config)
    model, blueprint = build_pieces(config, precision.master)
    initialise_whole(model, init_rule(config, blueprint), seed=config.align.seed)
    step = ReferenceStep(model, blueprint, precision, num_rows=1)
    held_out = open_held_out(config)
    assert held_out is not None
    total, count = 0.0, 0
    for number in range(held_out.num_batches):
        loss, num_tokens = step(held_out.global_batch(number))
        total, count = total + float(loss) * num_tokens, count + num_tokens
    return total / count, count


# All that a pipeline, FSDP that keeps parameters gathered, and slices of the sequence can do to it.
MESHES = [
    {"pp": 2, "dp_shard": 2},
    {"cp": 2, "tp": 2},
    pytest.param({"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_loss_is_that_of_one_device(tmp_path, mesh):
    # A step that moves nothing, so that the weights are those of a new model.
    config = validated(
        tmp_path,
        mesh=mesh,
        train={"steps": 1},
        schedule={"warmup_steps": 0},
        optimizer={"lr": 1e-30, "weight_decay": 0.0},
        fsdp={"reshard_after_forward": False},
    )
    _, said = run(config)
    expected, count = losses_on_one_device(config)
    [line] = lines_of(config)
    assert line["validation_tokens"] == count == 150
    assert abs(line["validation_loss"] - expected) <= 1e-14 * expected
    assert any(f"step 1/1: validation loss {expected:.4f} over {count} tokens" in t for t in said)


@pytest.mark.parametrize(
    "schedule", [pytest.param("Interleaved1F1B", marks=pytest.mark.long), "ZBVZeroBubble"]
)
@pytest.mark.long
def test_virtual_stages_are_passed_in_order(tmp_path, schedule):
    def losses(folder: str, **sections) -> list[float]:
        config = validated(tmp_path / folder, **sections)
        run(config)
        return [line["validation_loss"] for line in lines_of(config)]

    fsdp = {"wrap": "root"}
    pipeline = {"schedule": schedule, "num_microbatches": 4}
    ours = losses("ours", mesh={"pp": 2}, pipeline=pipeline, fsdp=fsdp)
    alone = losses("alone", fsdp=fsdp)
    assert len(ours) == 2
    for loss, expected in zip(ours, alone, strict=True):
        assert abs(loss - expected) <= 1e-12 * expected


@pytest.mark.parametrize(
    ("mesh", "sections"),
    [
        pytest.param(
            {"pp": 2, "dp_shard": 2},
            {"fsdp": {"reshard_after_forward": False}},
            marks=pytest.mark.long,
        ),
        ({"dp_shard": 2, "ep": 2}, EXPERTS),
    ],
    ids=["dense", "experts"],
)
def test_training_does_not_notice(tmp_path, mesh, sections):
    # The same rows are trained on in both: what is validated on is another text.
    sections = {"train": {"steps": 3, "accumulate": 2}, **sections}
    with_it = validated(tmp_path / "with", mesh=mesh, validation={"every": 1}, **sections)
    without = training_config(tmp_path / "without", mesh=mesh, **sections)
    run(with_it)
    run(without)
    ours, theirs = tensors_in(newest(with_it)), tensors_in(newest(without))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = [line for line in read_metrics(tmp_path / "with") if "loss" in line]
    for line, other in zip(lines, read_metrics(tmp_path / "without"), strict=True):
        assert (line["loss"], line["norm"]) == (other["loss"], other["norm"])
    losses = [line["validation_loss"] for line in lines_of(with_it)]
    assert len(set(losses)) == 3  # it sees the weights move


def test_one_validation_at_the_end_and_none_twice(tmp_path):
    config = validated(tmp_path, validation={"every": 3})
    run(config)
    assert [line["step"] for line in lines_of(config)] == [3, 4]
    run(config)
    assert [line["step"] for line in lines_of(config)] == [3, 4]


def _train_with_routers_counting(config: RunConfig) -> None:
    """Leave modules in training mode meanwhile, so that routers count what is held out."""
    import paralign.program

    vars(paralign.program)["_evaluation_mode"] = lambda stages: nullcontext()
    run_training(config, lambda text: None)


def test_a_validation_that_routers_count_is_caught(tmp_path):
    # What test_training_does_not_notice asserts is not so when one thing is left out.
    without = training_config(tmp_path / "without", **EXPERTS)
    broken = validated(tmp_path / "broken", validation={"every": 1}, **EXPERTS)
    run(without)
    run_ranks(_train_with_routers_counting, 1, broken, timeout=60)
    ours, theirs = tensors_in(newest(broken)), tensors_in(newest(without))
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)


def _losses_before_and_after_a_move(config: RunConfig, is_broken: bool) -> list[float]:
    import paralign.program

    if is_broken:
        vars(paralign.program)["free_gathered"] = lambda stage: None
    program = build_program(config, training_numerics(config))
    held_out = open_held_out(config)
    assert held_out is not None
    losses = [validate(program, held_out)[0]]
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(0.9)
    return [*losses, validate(program, held_out)[0]]


@pytest.mark.parametrize("is_broken", [False, True])
def test_nothing_that_was_gathered_is_used_after_a_move(tmp_path, is_broken):
    config = validated(
        tmp_path, mesh={"dp_shard": 2}, fsdp={"reshard_after_forward": False, "wrap": "root"}
    )
    for before, after in run_ranks(
        _losses_before_and_after_a_move, 2, config, is_broken, timeout=60
    ):
        assert (before == after) is is_broken
