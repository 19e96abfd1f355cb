from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard

from paralign.align.inspect import inspect
from paralign.align.trace import Kind
from tests.align.inspect.runs import look, on, only
from tests.align.synthetic import write_trace


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stages(tmp_path, params, stage_of, pp=2):
    step = {(Kind.PARAM, name): value for name, value in params.items()}
    write_trace(
        tmp_path,
        [step],
        mesh={"pp": pp},
        leave_out=lambda rank, entry: rank not in stage_of(entry.name),
    )
    return inspect(tmp_path)


def test_shards_drawn_from_one_seed(tmp_path):
    step = {(Kind.PARAM, "up.weight"): draw(8, 6)}
    shard = draw(4, 6, seed=1)
    report = look(
        tmp_path,
        [step],
        norm=None,
        mesh={"tp": 2},
        placements=lambda name: (Shard(0),),
        change=on({0, 1}, Kind.PARAM, "up.weight", lambda _: shard),
    )
    finding = only(report)
    assert (finding.component, finding.cause, finding.axes) == ("weights", "rng", ["tp"])


def test_shards_of_ones_say_nothing(tmp_path):
    step = {(Kind.PARAM, "norm.weight"): torch.ones(32, dtype=torch.float64)}
    report = look(tmp_path, [step], norm=None, placements=lambda name: (Shard(0), Replicate()))
    assert report.verdict == "clean"


def test_stages_that_begin_from_the_same_seed(tmp_path):
    params = {
        f"layers.{n}.{part}": draw(4, 4, seed=s) for n in (0, 1) for s, part in enumerate("ab")
    }
    finding = only(stages(tmp_path, params, lambda name: {int(name.split(".")[1])}))
    assert (finding.cause, finding.axes, finding.tensor) == ("rng", ["pp"], "layers.1.a")
    assert finding.evidence["parameters"] == 2


def test_a_tied_pair_is_one_pair(tmp_path):
    params = {"embed.weight": draw(8, 4), "head.weight": draw(8, 4), "norm.weight": draw(9, seed=4)}
    report = stages(tmp_path, params, lambda name: {0} if name == "embed.weight" else {1})
    assert report.verdict == "clean"


def layers(numbers):
    return {
        f"layers.{n}.{part}": draw(4, 4, seed=10 * n + s)
        for n in numbers
        for s, part in enumerate("abc")
    }


def test_a_layer_that_no_stage_holds(tmp_path):
    finding = only(
        stages(tmp_path, layers((0, 1, 3, 4)), lambda name: {int(int(name.split(".")[1]) > 2)})
    )
    assert (finding.cause, finding.axes, finding.tensor) == ("wrong_layer", ["pp"], "layers.2")
    assert "no stage holds layers.2" in finding.fix


def test_a_layer_that_two_stages_hold(tmp_path):
    def stage_of(name):
        number = int(name.split(".")[1])
        return {0, 1} if number == 1 else {int(number > 1)}

    finding = only(stages(tmp_path, layers((0, 1, 2)), stage_of))
    assert (finding.cause, finding.evidence["twice"]) == ("wrong_layer", [1])


def test_numbers_with_gaps_of_their_own(tmp_path):
    report = stages(tmp_path, layers((0, 2, 4, 6)), lambda name: {int(int(name.split(".")[1]) > 3)})
    assert report.verdict == "clean"


def test_nan_before_the_first_step(tmp_path):
    step = {(Kind.PARAM, "w"): torch.full((3, 3), float("nan"), dtype=torch.float64)}
    assert only(look(tmp_path, [step], norm=None)).component == "weights"
