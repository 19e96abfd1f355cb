from __future__ import annotations

import json
from pathlib import Path

from paralign.align.inspect import inspect
from tests.align.inspect.runs import look, only, plain_step
from tests.align.synthetic import write_trace

NAMES = ["embed.weight", "layers.0.w", "norm.weight"]


def adam(lr, names=NAMES):
    return {"class": "AdamW", "groups": [{"options": {"lr": lr}, "names": list(names)}]}


def edit(folder: Path, rank: int, change):
    path = folder / f"rank{rank:05d}.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_options_that_differ_over_an_axis(tmp_path):
    look(tmp_path, [plain_step()], optimizers=[adam(1e-3)])
    for rank in (2, 3):
        edit(tmp_path, rank, lambda data: data.update(optimizers=[adam(1e-4)]))
    finding = only(inspect(tmp_path))
    assert (finding.component, finding.cause) == ("config", "different_config")
    assert finding.axes == ["dp"]
    assert "0.001 on rank 0, 1, 0.0001 on rank 2, 3" in finding.fix


def test_a_flag_and_a_dtype_that_differ(tmp_path):
    look(tmp_path, [plain_step()])

    def freeze(data):
        for entry in data["tensors"]:
            entry["trainable"] = entry["name"] != "norm.weight"

    edit(tmp_path, 1, freeze)
    finding = only(inspect(tmp_path))
    assert (finding.tensor, finding.axes) == ("norm.weight", ["dp", "cp"])
    assert "requires_grad" in finding.fix


def test_facts_that_differ(tmp_path):
    look(tmp_path, [plain_step()])
    for rank in range(4):
        said = {"seed": 1 + rank % 2, "host": rank, "clip": 1.0}
        edit(tmp_path, rank, lambda data, said=said: data.update(run=said))
    finding = only(inspect(tmp_path))
    assert (finding.cause, finding.axes, finding.tensor) == ("different_config", ["cp"], None)
    assert finding.fix.startswith("the fact seed differs between ranks: 1 on rank 0, 2, 2 on rank")


def stage_trace(tmp_path, rates):
    """Two stages of two layers each, every layer with its rate."""
    import torch

    from paralign.align.trace import Kind

    step = {
        (Kind.PARAM, f"layers.{n}.w"): torch.randn(3, 3, generator=torch.Generator().manual_seed(n))
        for n in range(4)
    }
    write_trace(
        tmp_path,
        [step],
        mesh={"pp": 2},
        leave_out=lambda rank, entry: int(entry.name.split(".")[1]) // 2 != rank,
    )
    for rank in (0, 1):
        groups = [adam(rates[n], [f"layers.{n}.w"]) for n in (2 * rank, 2 * rank + 1)]
        edit(tmp_path, rank, lambda data, groups=groups: data.update(optimizers=groups))
    return inspect(tmp_path)


def test_a_stage_with_another_rate(tmp_path):
    finding = only(stage_trace(tmp_path, [1e-3, 1e-3, 1e-4, 1e-4]))
    assert (finding.axes, finding.tensor) == (["pp"], "layers.#.w")


def test_a_rate_by_layer_is_as_wanted(tmp_path):
    assert stage_trace(tmp_path, [4e-3, 3e-3, 2e-3, 1e-3]).verdict == "clean"
