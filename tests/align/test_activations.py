from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from paralign.align import compare, record
from paralign.align.activations import tensors_of
from paralign.align.tensor_entry import Kind, TensorEntry
from paralign.align.trace_reader import TraceReader
from paralign.layout import boxes
from paralign.testing import run_on_ranks
from tests.align.nets import ALL, Net, build, train
from tests.align.toys import batches


def entries(folder: Path, kind: str) -> list[TensorEntry]:
    with TraceReader(folder) as reader:
        found = [entry for entry in reader.ranks[0].tensors if entry.kind == kind]
    return sorted(found, key=lambda entry: entry.order or 0)


def read(folder: Path, kind: str, name: str, micro_batch: int = 0, call: int = 0) -> Tensor:
    with TraceReader(folder) as reader:
        [entry] = [
            entry
            for entry in reader.ranks[0].tensors
            if (entry.kind, entry.name, entry.micro_batch, entry.call)
            == (kind, name, micro_batch, call)
        ]
        [box] = boxes(entry.map)
        return reader.read(entry, box)


FORWARD = [
    "embed",
    *(f"blocks.{n}{part}" for n in range(2) for part in (".up", ".down", "[0]", "[1]")),
    "norm",
    "head",
]


def test_outputs_come_in_forward_order_and_gradients_in_backward_order(tmp_path: Path) -> None:
    train(tmp_path, build())
    outputs = entries(tmp_path, Kind.OUTPUT)
    assert [(e.micro_batch, e.name) for e in outputs] == [(m, n) for m in (0, 1) for n in FORWARD]
    grads = [e.name for e in entries(tmp_path, Kind.OUTPUT_GRAD) if e.micro_batch == 1]
    assert sorted(grads) == sorted(FORWARD)
    assert [n for n in grads if "." not in n and "[" not in n] == ["head", "norm", "embed"]
    assert grads.index("blocks.1.up") < grads.index("blocks.0.down") < grads.index("blocks.0.up")


def test_what_is_recorded_is_what_passed(tmp_path: Path) -> None:
    train(tmp_path, build())
    model = build()
    tokens, labels = next(batches(1))
    seen: dict[str, Tensor] = {}
    for name in ("norm", "blocks.1.up"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda m, a, out, name=name: seen.setdefault(name, out))
    logits = model(tokens[4:])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[4:].flatten(), reduction="sum")
    wanted = dict(zip(seen, torch.autograd.grad(loss / 48, list(seen.values())), strict=True))
    for name, output in seen.items():
        assert torch.equal(read(tmp_path, Kind.OUTPUT, name, micro_batch=1), output)
        assert torch.equal(read(tmp_path, Kind.OUTPUT_GRAD, name, micro_batch=1), wanted[name])
    assert torch.equal(read(tmp_path, Kind.INPUT, "tokens", micro_batch=1), tokens[4:])


def test_tensors_are_found_wherever_they_are_in_an_output() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = dict(tensors_of((a, {"cache": [b, None, 7], "x": (c,)}, "text")))
    assert {place: len(t) for place, t in found.items()} == {
        "[0]": 1,
        "[1][cache][0]": 2,
        "[1][x][0]": 3,
    }


def test_recording_leaves_the_run_as_it_is_to_the_last_bit(tmp_path: Path) -> None:
    for repeat in ("", "reentrant", "non_reentrant"):
        seen = train(tmp_path / repeat, build(repeat))
        alone = train(None, build(repeat))
        for one, other in zip(seen.parameters(), alone.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("repeat", ["reentrant", "non_reentrant"])
def test_checkpointing_counts_a_forward_once(tmp_path: Path, repeat: str) -> None:
    train(tmp_path / "plain", build())
    train(tmp_path / repeat, build(repeat))
    for kind in (Kind.OUTPUT, Kind.OUTPUT_GRAD):
        plain, repeated = (
            sorted((e.micro_batch, e.name, e.call) for e in entries(folder, kind))
            for folder in (tmp_path / "plain", tmp_path / repeat)
        )
        assert repeated == plain
    report = compare(tmp_path / "plain", tmp_path / repeat)
    assert report.verdict == "aligned", report.why
    assert {row.eps for row in report.tensors if row.kind in (Kind.OUTPUT, Kind.OUTPUT_GRAD)} == {0}
    assert len([row for row in report.tensors if row.kind == Kind.OUTPUT_GRAD]) == len(FORWARD)


def test_a_module_filter_and_what_it_leaves_out(tmp_path: Path) -> None:
    train(tmp_path, build(), modules="blocks.*.up", what=("grads", "outputs"))
    assert {e.name for e in entries(tmp_path, Kind.OUTPUT)} == {"blocks.0.up", "blocks.1.up"}
    assert entries(tmp_path, Kind.OUTPUT_GRAD) == entries(tmp_path, Kind.INPUT) == []


def test_a_module_called_twice_and_parts_called_by_the_loop(tmp_path: Path) -> None:
    model = build()

    def call(tokens: Tensor) -> Tensor:
        x = model.embed(tokens)
        for block in (model.blocks[0], model.blocks[0], model.blocks[1]):
            x = block(x)[0]
        logits: Tensor = model.head(model.norm(x))
        return logits

    train(tmp_path, model, call)
    calls = [
        (e.micro_batch, e.call) for e in entries(tmp_path, Kind.OUTPUT) if e.name == "blocks.0.up"
    ]
    assert calls == [(0, 0), (0, 1), (1, 0), (1, 1)]
    grads = [
        (e.micro_batch, e.call)
        for e in entries(tmp_path, Kind.OUTPUT_GRAD)
        if e.name == "blocks.0.up"
    ]
    assert grads == [(0, 1), (0, 0), (1, 1), (1, 0)]


def test_validation_does_not_count(tmp_path: Path) -> None:
    model = build()

    def call(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            model.eval()(tokens)
        logits: Tensor = model.train()(tokens)
        return logits

    train(tmp_path, model, call)
    assert [e.micro_batch for e in entries(tmp_path, Kind.OUTPUT) if e.name == "head"] == [0, 1]


class Compiled(nn.Module):
    """What torch.compile returns, as far as its children go."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


def test_what_is_compiled_is_named_and_its_parts_are_not_watched(tmp_path: Path) -> None:
    model = build()
    model.blocks[0] = Compiled(model.blocks[0])
    train(tmp_path, model)
    names = {entry.name for entry in entries(tmp_path, Kind.OUTPUT)}
    assert "blocks.0[0]" in names and "blocks.0.up" not in names and "blocks.1.up" in names
    with TraceReader(tmp_path) as reader:
        assert [item["name"] for item in reader.ranks[0].unseen] == ["blocks.0.*"]


class Half(nn.Module):
    """One of two pipeline stages, under the whole model's names."""

    def __init__(self, whole: Net, stage: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(stage): whole.blocks[stage]})
        if stage == 0:
            self.embed = whole.embed
        else:
            self.norm, self.head = whole.norm, whole.head
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.stage == 0 else x
        x, more = self.blocks[str(self.stage)](x)
        x = x * (1 + more)
        return x if self.stage == 0 else self.head(self.norm(x))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    flat = logits.flatten(0, 1)
    return nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum") / 48


def pipeline(folder: str, fault: bool) -> None:
    """Torch's own pipelining, which runs each stage once more to find its shapes."""
    rank = dist.get_rank()
    half = Half(build(), rank)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-2)
    mesh = {"pp": dist.group.WORLD}
    if fault and rank == 1:
        half.get_submodule("blocks.1.down").register_forward_hook(
            lambda module, args, out: out * 1.001
        )
    with record(folder, half, mesh=mesh, optimizer=optimizer, what=ALL) as rec:
        for tokens, labels in batches(1):
            losses: list[Tensor] = []
            schedule.step(*([tokens] if rank == 0 else []), target=labels, losses=losses)
            if rank == 1:
                rec.loss(torch.stack(losses).sum() * 48, tokens=48)
            optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("fault", [False, True])
def test_a_pipeline_counts_micro_batches_and_no_shape_inference(
    tmp_path: Path, fault: bool
) -> None:
    train(tmp_path / "ref", build(), micro_batches=1)
    run_on_ranks(pipeline, 2, str(tmp_path / "par"), fault)
    with TraceReader(tmp_path / "par") as reader:
        numbers = [
            entry.micro_batch
            for entry in reader.ranks[1].tensors
            if (entry.kind, entry.name) == (Kind.OUTPUT, "norm")
        ]
    assert numbers == [0, 1, 2, 3]
    report = compare(tmp_path / "ref", tmp_path / "par")
    rows = [row for row in report.tensors if row.kind in (Kind.OUTPUT, Kind.OUTPUT_GRAD)]
    assert len(rows) == 2 * len(FORWARD), report.notes
    if not fault:
        assert report.verdict == "aligned", report.why
        return
    assert report.verdict == "misaligned"
    wrong = [row for row in rows if not row.ok]
    assert (wrong[0].kind, wrong[0].name, wrong[0].ranks_off) == (Kind.OUTPUT, "blocks.1.down", [1])
    assert all(
        row.ok for row in rows if row.kind == Kind.OUTPUT and row.name.startswith("blocks.0")
    )
