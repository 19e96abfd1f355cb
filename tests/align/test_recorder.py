from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from paralign.align import compare, record
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import TraceError
from paralign.layout import boxes
from paralign.testing import run_on_ranks
from tests.align.toys import EVERYTHING, batches, build, loss_of, tensors, train


def test_clipped_gradients_are_taken_only_where_clipping_changed_them(tmp_path: Path) -> None:
    for max_norm, expected in ((0.01, True), (1e9, False)):
        model = build()
        with record(tmp_path / "t", model):
            train(model, 1, max_norm=max_norm)
        found = tensors(tmp_path / "t")
        clipped = {name: t for (kind, _, name), t in found.items() if kind == Kind.CLIPPED_GRAD}
        assert bool(clipped) is expected
        for name, parameter in model.named_parameters():
            if expected and parameter.grad is not None:
                assert torch.equal(clipped[name], parameter.grad)


class Trainer:
    """A loop with everything inside ``step()``."""

    def __init__(self, model: nn.Module, max_norm: float | None) -> None:
        self.model, self.max_norm = model, max_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.batches = batches(2)

    def step(self) -> None:
        tokens, labels = next(self.batches)
        self.optimizer.zero_grad()
        loss_of(self.model, tokens, labels, labels.numel()).backward()
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()


@pytest.mark.parametrize("max_norm", [0.01, None])
@pytest.mark.parametrize("told", [True, False])
def test_a_trainer_that_does_all_in_one_step(
    tmp_path: Path, max_norm: float | None, told: bool
) -> None:
    model = build()
    with record(tmp_path / "one", model, steps=2, what=("params", "grads")):
        train(model, 2, max_norm=1e9 if max_norm is None else max_norm)
    model = build()
    trainer = Trainer(model, max_norm)
    optimizer = trainer if told else None
    what = ("params", "grads")
    with record(tmp_path / "t", model, optimizer=optimizer, steps=2, what=what):
        trainer.step()
        trainer.step()
    one, found = tensors(tmp_path / "one"), tensors(tmp_path / "t")
    assert found.keys() == one.keys()
    assert (Kind.GRAD, 1, "norm.weight") in found
    assert all(torch.equal(found[key], one[key]) for key in one)


# ---- real ranks ----


def train_sharded(folder: str, mesh_shape: dict[str, int], fault: str = "") -> int:
    """Train on rows split over all ranks, parameters over ``fsdp`` (dp and cp folded)."""
    world = dist.get_world_size()
    names = tuple(mesh_shape)
    mesh = init_device_mesh("cpu", tuple(mesh_shape.values()), mesh_dim_names=names)
    flat = mesh if len(names) == 1 else mesh[names]._flatten("fsdp")
    model = build()
    # Tied and frozen parameters go into one unit with the rest; the layers have their own.
    fully_shard(model.layers[1], mesh=flat)
    fully_shard(model, mesh=flat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rank = dist.get_rank()
    with record(folder, model, mesh=mesh, optimizer=optimizer, steps=2, what=EVERYTHING) as rec:
        for tokens, labels in batches(2):
            optimizer.zero_grad()
            local = loss_of(model, tokens[rank::world], labels[rank::world], labels.numel())
            (local * world).backward()  # FSDP averages
            if fault == "rank" and rank == 1:
                model.norm.weight.grad.to_local().mul_(1.5)  # type: ignore[union-attr]
            if fault == "factor":
                model.layers[0].weight.grad.mul_(0.25)  # type: ignore[union-attr, operator]
            rec.loss(local * labels.numel(), tokens=labels[rank::world].numel())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return rank


def train_alone(folder: Path) -> None:
    model = build()
    with record(folder, model, steps=2, what=EVERYTHING) as rec:
        train(model, 2, recorder=rec, max_norm=0.1)


@pytest.mark.ranks
def test_shardings_and_one_device_agree(tmp_path: Path) -> None:
    train_alone(tmp_path / "one")
    run_on_ranks(train_sharded, 4, str(tmp_path / "fsdp4"), {"fsdp": 4})
    run_on_ranks(train_sharded, 4, str(tmp_path / "fsdp2cp2"), {"dp_shard": 2, "cp": 2})
    for reference, parallel in (
        ("one", "fsdp4"),
        ("one", "fsdp2cp2"),
        ("fsdp2cp2", "fsdp4"),
        ("fsdp4", "one"),
    ):
        report = compare(tmp_path / reference, tmp_path / parallel)
        assert report.verdict == "aligned", (reference, parallel, report.why)
        assert report.coverage.compared == report.coverage.parameters == 8
    with TraceReader(tmp_path / "fsdp2cp2") as reader:
        index = reader.ranks[3]
        assert index.coordinates == {"dp_shard": 1, "cp": 1, "fsdp": 3}
        assert index.axes == {"dp_shard": [1, 3], "cp": [2, 3], "fsdp": [0, 1, 2, 3]}
        entry = next(e for e in index.tensors if e.name == "embed.weight" and e.kind == Kind.GRAD)
        assert entry.map[0] == (((0, 2), (9, 11)),)
        assert entry.replicated_over == ()


@pytest.mark.ranks
def test_faults_on_real_ranks_are_found(tmp_path: Path) -> None:
    train_alone(tmp_path / "one")
    run_on_ranks(train_sharded, 4, str(tmp_path / "factor"), {"fsdp": 4}, "factor")
    report = compare(tmp_path / "one", tmp_path / "factor")
    (finding,) = report.findings
    assert (finding.cause, finding.axes) == ("constant_factor", ["fsdp"])
    assert (finding.evidence["factor"], finding.tensor) == ("1/4", "layers.0.weight")
    run_on_ranks(train_sharded, 4, str(tmp_path / "rank"), {"fsdp": 4}, "rank")
    report = compare(tmp_path / "one", tmp_path / "rank")
    (finding,) = report.findings
    assert (finding.cause, finding.evidence["ranks"]) == ("single_rank", [1])
    run_on_ranks(train_sharded, 4, str(tmp_path / "folded"), {"dp_shard": 2, "cp": 2}, "factor")
    report = compare(tmp_path / "one", tmp_path / "folded")
    (finding,) = report.findings
    # The folded axis itself is no further suspect.
    assert finding.axes == ["dp_shard", "cp"]
    assert not any("fsdp" in candidate for candidate in finding.candidates)


def record_placements(folder: str) -> dict[str, Any]:
    """Record DTensors over (dp, tp) next to a plain tensor, and say what each rank holds."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.LayerNorm(3))

    def place(name: str, module: nn.Module, on: Any) -> None:
        if name == "0":
            for key, parameter in list(module.named_parameters()):
                shard = distribute_tensor(parameter.data, on, [Replicate(), Shard(0)])
                module.register_parameter(key, nn.Parameter(shard))
        if name == "1":
            shard = distribute_tensor(module.weight.data, on, [Shard(0), Shard(1)])  # type: ignore[arg-type]
            module.register_parameter("weight", nn.Parameter(shard))

    distribute_module(model[:2], mesh, place)
    with record(folder, model, mesh=mesh, what=("params",)) as rec:
        pass
    del rec
    return {
        name: p.full_tensor().tolist() if hasattr(p, "full_tensor") else p.tolist()
        for name, p in model.named_parameters()
    }


@pytest.mark.ranks
def test_pieces_are_where_full_tensor_puts_them(tmp_path: Path) -> None:
    (expected, *_) = run_on_ranks(record_placements, 4, str(tmp_path / "t"))
    with TraceReader(tmp_path / "t") as reader:
        seen: dict[str, Tensor] = {}
        for index in reader.ranks:
            for entry in index.tensors:
                full = seen.setdefault(entry.name, torch.full(entry.shape, torch.nan))
                for box in boxes(entry.map):
                    region = zip(box.start, box.shape, strict=True)
                    full[tuple(slice(at, at + n) for at, n in region)] = reader.read(entry, box)
        replicated = {entry.name: entry.replicated_over for entry in reader.ranks[0].tensors}
    for name, values in expected.items():
        assert seen[name].tolist() == values
    assert replicated == {
        "0.weight": ("dp",),
        "0.bias": ("dp",),
        "1.weight": (),
        "2.weight": ("dp", "tp"),
        "2.bias": ("dp", "tp"),
    }


def refuse_together(folder: str) -> str:
    try:
        record(folder, nn.Linear(2, 2)).start()
    except TraceError as error:
        return str(error)
    return "started"


@pytest.mark.ranks
def test_no_rank_waits_for_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    messages = run_on_ranks(refuse_together, 2, str(tmp_path))
    assert "holds 'precious.txt', which is no part of a trace" in messages[0]
    assert messages[1] == messages[0]


def record_alone_in_a_world(folder: str) -> bool:
    if dist.get_rank() == 0:
        train_in_world = build()
        with record(folder, train_in_world, alone=True):
            train(train_in_world, 1)
    dist.barrier()
    return True


@pytest.mark.ranks
def test_one_rank_can_record_a_run_of_its_own(tmp_path: Path) -> None:
    run_on_ranks(record_alone_in_a_world, 2, str(tmp_path / "t"))
    with TraceReader(tmp_path / "t") as reader:
        assert reader.world_size == 1
