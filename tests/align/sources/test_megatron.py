"""Megatron's marks, on parameters that are marked as its layers mark them."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.align import compare, record
from paralign.align.fused import Fused
from paralign.align.sources.megatron import MEGATRON, norm_of_step
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.testing import run_on_ranks
from paralign.weights.initial import load_initial
from tests.align.shard_toys import ElementWise, Layer, Model, train, whole_tensors

NAMES: dict[str, str | Fused] = {
    "decoder.layers.*.linear_qkv": Fused(
        {"layers.*.wq": 2, "layers.*.wk": 1, "layers.*.wv": 1}, groups=4
    ),
    "decoder.layers.*.linear_fc1": Fused({"layers.*.gate": 1, "layers.*.up": 1}, groups=1),
    "decoder.layers.*.linear_proj": "layers.*.wo",
    "decoder.layers.*.norm": "layers.*.norm",
    "word_embeddings": "embed",
}
# Megatron's name -> partition_dim, partition_stride.
MARKS = {
    "linear_qkv": (0, 1),
    "linear_fc1": (0, 2),
    "linear_proj": (1, 1),
    "word_embeddings": (0, 1),
}
SIZES = {"linear_qkv": (48, 5), "linear_fc1": (12, 5), "linear_proj": (5, 24), "norm": (5,)}


def mark(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():
        dim, stride = MARKS.get(name.rpartition(".")[2], (-1, 1))
        parameter.tensor_model_parallel = dim >= 0  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
        parameter.partition_stride = stride  # type: ignore[attr-defined]
    return module


class Stage(ElementWise):
    """One pipeline stage of one layer, whose list begins at 0 on every stage."""

    def __init__(self, stage: int, tp: int) -> None:
        super().__init__()
        shapes = {
            name: torch.zeros(
                [n // tp if dim == MARKS.get(name, (-1,))[0] else n for dim, n in enumerate(shape)],
                dtype=torch.float64,
            )
            for name, shape in SIZES.items()
        }
        layer: Any = Layer(shapes)
        layer.layer_number = stage + 1
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([layer])
        if stage == 0:
            rows = 6 if dist.get_rank() % tp == 0 else 5
            self.word_embeddings = nn.Parameter(torch.zeros(rows, 5, dtype=torch.float64))


def run_stages(reference: str, folder: str, fault: str) -> None:
    rank = dist.get_rank()
    pp_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = types.ModuleType("megatron.core.parallel_state")
    alone = [dist.new_group([r]) for r in range(4)][rank]
    members: dict[str, Any] = {
        "model_parallel_is_initialized": lambda: True,
        "get_pipeline_model_parallel_group": lambda: pp_groups[rank % 2],
        "get_tensor_model_parallel_group": lambda: tp_groups[rank // 2],
        "get_data_parallel_group": lambda: alone,
        "get_context_parallel_group": lambda: alone,
    }
    vars(state).update(members)
    sys.modules["megatron.core.parallel_state"] = state
    model = mark(Stage(rank // 2, 2))
    load_initial(model, reference, names=NAMES)
    if fault == "stride":
        for name, parameter in model.named_parameters():
            if name.endswith("linear_fc1"):
                parameter.partition_stride = 1  # type: ignore[attr-defined]
    with record(folder, model, names=NAMES, what=("params", "grads", "optimizer")):
        if fault == "gradient":
            model.decoder.layers[0].norm.register_hook(lambda g: g * (1 + rank % 2))  # type: ignore[index, union-attr]
        train(model)


def record_whole(folder: Path) -> None:
    model = Model(whole_tensors())
    with record(folder, model, what=("params", "grads", "optimizer")):
        train(model)


@pytest.mark.ranks
def test_stages_of_shards_are_put_together(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    for fault in ("", "gradient", "stride"):
        run_on_ranks(run_stages, 4, str(tmp_path / "one"), str(tmp_path / "par"), fault)
        report = compare(tmp_path / "one", tmp_path / "par", allow_skipped=True)
        assert (report.verdict == "aligned") is (fault == ""), (fault, report.why)
        if not fault:
            assert report.coverage.compared == report.coverage.parameters == 15
            with TraceReader(tmp_path / "par") as reader:
                assert reader.ranks[3].coordinates == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
                names = {e.name for e in reader.ranks[3].tensors}
                assert "layers.1.wq" in names
                assert not any(name.startswith("layers.0") for name in names)


@dataclass
class Range:
    start: int
    end: int


class Bucket:
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.param_to_bucket = dict.fromkeys(parameters)


class DistributedOptimizer:
    """Steps ranges of flattened parameters, as Megatron's optimizer of the same name."""

    def __init__(self, ranges: dict[nn.Parameter, Range], all_of_them: list[nn.Parameter]) -> None:
        self.model_param_gbuf_map = ranges
        self.buffers = [Bucket(all_of_them)]
        mains = []
        for parameter, owned in ranges.items():
            main = parameter.detach().flatten()[owned.start : owned.end].clone()
            parameter.main_param = main  # type: ignore[attr-defined]
            mains.append(main)
        self.optimizer = torch.optim.AdamW(mains, lr=1e-2)

    def _get_model_param_range_map(self, parameter: nn.Parameter) -> dict[str, Range]:
        return {"param": self.model_param_gbuf_map[parameter]}

    def step(self) -> tuple[bool, float, None]:
        for parameter, owned in self.model_param_gbuf_map.items():
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]
            main: Tensor = parameter.main_param  # type: ignore[attr-defined]
            main.grad = gradient.flatten()[owned.start : owned.end].clone()
        self.optimizer.step()
        return True, 7.5, None


def run_distributed_optimizer(folder: str) -> None:
    rank = dist.get_rank()
    model: Any = mark(Model(whole_tensors()))
    parameters = list(model.parameters())
    model().backward()
    ranges = {}
    for number, parameter in enumerate(parameters):
        # The first tensor belongs to rank 1 alone, the others are cut at an odd place.
        cut = 0 if number == 0 else parameter.numel() // 2 + 1
        ends = [(0, cut), (cut, parameter.numel())][rank]
        if ends[0] < ends[1]:
            ranges[parameter] = Range(*ends)
        # Only the own range of the buffer has been reduced.
        parameter.main_grad = torch.full_like(parameter, torch.nan)
        owned = parameter.main_grad.flatten()[slice(*ends)]
        owned.copy_(parameter.grad.flatten()[slice(*ends)])
        parameter.grad = None
    optimizer = DistributedOptimizer(ranges, parameters)
    mesh = {"dp": (rank, 2)}
    with record(folder, model, optimizer=optimizer, mesh=mesh, what=("grads", "optimizer", "norm")):
        optimizer.step()


@pytest.mark.ranks
def test_ranges_of_a_distributed_optimizer(tmp_path: Path) -> None:
    record_whole(tmp_path / "one")
    run_on_ranks(run_distributed_optimizer, 2, str(tmp_path / "par"))
    report = compare(tmp_path / "one", tmp_path / "par", allow_skipped=True)
    compared = [row for row in report.tensors if row.kind in (Kind.GRAD, Kind.MOMENT)]
    assert len([row for row in compared if row.kind == Kind.GRAD]) == 15
    assert all(row.ok for row in compared)
    with TraceReader(tmp_path / "par") as reader:
        assert [e.value for e in reader.ranks[0].scalars if e.kind == "norm"] == [7.5]
        held = [{e.name for e in index.tensors if e.kind == Kind.GRAD} for index in reader.ranks]
        assert held[1] - held[0] == {"embed"}


def test_the_gradient_is_where_megatron_collects_it() -> None:
    parameter: Any = nn.Parameter(torch.ones(2))
    assert not MEGATRON.knows(parameter)
    parameter.main_grad = torch.full((2,), 3.0)
    assert MEGATRON.knows(parameter)
    assert MEGATRON.gradient(parameter) is parameter.main_grad
    parameter.main_grad, parameter.grad = None, torch.zeros(2)
    assert MEGATRON.gradient(parameter) is parameter.grad
    assert MEGATRON.cuts(parameter) == {}


def test_what_a_step_returns() -> None:
    assert norm_of_step((True, 2.5, 0)) == 2.5
    assert norm_of_step((False, None, None)) is None
    assert norm_of_step(None) is None
