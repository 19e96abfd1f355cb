"""DeepSpeed's interface, played by functions of the same names."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from paralign.align import compare, record
from paralign.align.trace import Kind
from paralign.align.trace_reader import TraceReader
from paralign.errors import ConfigError
from paralign.testing import run_on_ranks
from paralign.weights.initial import load_initial
from tests.align.toys import batches, build, loss_of, train


def play_deepspeed() -> None:
    """Install the three functions; they put together what ``ZeRO3`` has taken apart."""
    module = types.ModuleType("deepspeed.utils")
    members: dict[str, Any] = {
        "safe_get_full_fp32_param": lambda p: p.zero.full(p.zero.shard),
        "safe_get_full_grad": lambda p: p.zero.full(p.zero.grad),
        "safe_get_full_optimizer_state": lambda p, name: p.zero.full(
            p.zero.optimizer.state[p.zero.shard].get(name)
        ),
    }
    vars(module).update(members)
    sys.modules["deepspeed.utils"] = module


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    sys.modules.pop("deepspeed.utils", None)


class ZeRO3:
    """One parameter, cut into flat shards; the model's own tensor is empty between uses."""

    def __init__(self, parameter: nn.Parameter, number: int) -> None:
        self.shape, self.parameter = parameter.shape, parameter
        padded = nn.functional.pad(parameter.detach().flatten(), (0, parameter.numel() % 2))
        self.shard = padded.chunk(2)[dist.get_rank()].clone()
        self.grad: Tensor | None = None
        self.optimizer: Any = None
        marked: Any = parameter
        marked.ds_id, marked.zero = number, self

    def full(self, shard: Tensor | None) -> Tensor | None:
        if shard is None:
            return None
        parts = [torch.empty_like(shard) for _ in range(2)]
        dist.all_gather(parts, shard)
        return torch.cat(parts)[: self.shape.numel()].view(self.shape)

    def gather(self) -> None:
        full = self.full(self.shard)
        assert full is not None
        self.parameter.data = full

    def scatter(self) -> None:
        gradient = self.parameter.grad
        self.parameter.grad = None
        self.parameter.data = torch.empty(0, dtype=torch.float64)
        if gradient is not None:
            dist.all_reduce(gradient)
            padded = nn.functional.pad(gradient.flatten(), (0, gradient.numel() % 2))
            part = padded.chunk(2)[dist.get_rank()]
            self.grad = part if self.grad is None else self.grad + part


class Engine(nn.Module):
    """Steps at every second micro-batch, and clips inside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.parts = [ZeRO3(p, n) for n, p in enumerate(module.parameters())]
        self.inner = torch.optim.AdamW([part.shard for part in self.parts], lr=1e-2)
        for part in self.parts:
            part.optimizer = self.inner
            part.parameter.data = torch.empty(0, dtype=torch.float64)
        self.micro_steps, self.norm = 0, 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        for part in self.parts:
            part.gather()
        logits: Tensor = self.module(tokens)
        return logits

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for part in self.parts:
            part.scatter()

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.micro_steps % 2 == 1

    def get_global_grad_norm(self) -> float:
        return self.norm

    def step(self) -> None:
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        squares = torch.zeros((), dtype=torch.float64)
        for part in self.parts:
            if part.grad is not None:
                squares += part.grad.square().sum()
        dist.all_reduce(squares)
        self.norm = float(squares.sqrt())
        for part in self.parts:
            if part.grad is not None:
                part.shard.grad = part.grad * min(1.0, 0.01 / (self.norm + 1e-6))
        self.inner.step()
        for part in self.parts:
            part.grad = None
            part.shard.grad = None


def run_engine(folder: str, fault: bool) -> str:
    play_deepspeed()
    rank = dist.get_rank()
    engine = Engine(build())
    what = ("loss", "norm", "params", "grads", "optimizer")
    mesh = {"dp": (rank, 2)}
    with record(folder, engine, optimizer=engine, steps=2, what=what, mesh=mesh) as rec:
        for tokens, labels in batches(2):
            for part in range(2):
                rows = slice(2 * part + rank, None, 4)
                loss = loss_of(engine, tokens[rows], labels[rows], labels.numel())
                engine.backward(loss * (1.5 if fault and rank else 1.0))
                rec.loss(loss.detach() * labels.numel(), tokens=labels[rows].numel())
                engine.step()
    with pytest.raises(ConfigError) as caught:
        load_initial(engine, folder, mesh=mesh)
    return str(caught.value)


@pytest.mark.ranks
def test_what_deepspeed_puts_together_is_recorded(tmp_path: Path) -> None:
    model = build()
    with record(tmp_path / "one", model, steps=2, what=("loss", "norm", "params", "grads")) as rec:
        train(model, 2, recorder=rec, max_norm=0.01)
    said = run_on_ranks(run_engine, 2, str(tmp_path / "zero"), False)
    assert "is kept by ZeRO-3: load before deepspeed.initialize" in said[0]
    report = compare(tmp_path / "one", tmp_path / "zero", allow_skipped=True)
    failed = [(row.kind, row.name, row.step) for row in report.tensors if not row.ok]
    assert failed == []
    assert {"loss", "norm", "param", "grad", "param_after"} <= {row.kind for row in report.tensors}
    with TraceReader(tmp_path / "zero") as reader:
        assert reader.facts.steps == [0, 1]
        first, second = reader.ranks
        assert {e.name for e in first.tensors if e.kind == Kind.MOMENT and e.state == "exp_avg"}
        assert [e for e in second.tensors if e.file is not None] == []
    run_on_ranks(run_engine, 2, str(tmp_path / "zero"), True)
    report = compare(tmp_path / "one", tmp_path / "zero", allow_skipped=True)
    assert report.verdict == "misaligned"
