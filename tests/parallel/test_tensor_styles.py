"""One module at a time: what a style computes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from paralign.collectives import all_gather_dim
from paralign.errors import ConfigError, LayoutError
from paralign.parallel.tensor_base import TensorParallel, TensorStyle
from paralign.parallel.tensor_styles import (
    ColumnParallel,
    RowParallel,
    SharedInput,
    TokenWise,
    VocabularyParallel,
)
from paralign.testing import run_on_ranks

EPS = torch.finfo(torch.float64).eps


def on_ranks(function: Any, degree: int, *args: Any) -> None:
    run_on_ranks(function, degree, *args)


class Block(nn.Module):
    """Two linears with a nonlinearity between, and a router that weighs tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Linear(6, 1)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        x = self.norm(x)
        x = x * self.scale(x)  # its rows are tokens of several samples: a cut dim in the middle
        return self.down(F.gelu(self.up(x))) * factor  # type: ignore[no-any-return]


PLAN: dict[str, TensorStyle] = {
    "norm": TokenWise(),
    "scale": TokenWise(),
    "up": ColumnParallel(),
    "down": RowParallel(),
}


def mesh_of_world() -> DeviceMesh:
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def close(mine: Tensor, expected: Tensor) -> None:
    assert float((mine - expected).norm()) <= 20 * EPS * float(expected.norm())


def _block(options: TensorParallel) -> None:
    sequence_parallel = options.sequence_parallel
    torch.manual_seed(0)
    mesh = mesh_of_world()
    n, rank = mesh.size(), mesh.get_local_rank()
    whole, cut = Block().double(), Block().double()
    cut.load_state_dict(whole.state_dict())
    plan: Any = {name: style.configured(options, enters=True) for name, style in PLAN.items()}
    parallelize_module(cut, mesh, plan)
    x = torch.randn(3, 2 * n, 6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 2 * n, 6, dtype=torch.float64)
    whole(x, factor=0.5).backward(grad)
    assert x.grad is not None
    mine = (x.chunk(n, 1)[rank] if sequence_parallel else x).detach().requires_grad_()
    out = cut(mine, factor=0.5)
    out.backward(grad.chunk(n, 1)[rank] if sequence_parallel else grad)
    assert mine.grad is not None
    pick = (lambda t: t.chunk(n, 1)[rank]) if sequence_parallel else (lambda t: t)
    close(out, pick(whole(x, factor=0.5)))
    close(mine.grad, pick(x.grad))
    spreads = {
        f"{name}.{leaf}": spread
        for name, style in plan.items()
        for leaf, spread in style.spreads(whole.get_submodule(name), n).items()
    }
    for name, p in cut.named_parameters():
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        local, expected = p.grad.to_local(), whole.get_parameter(name).grad
        assert expected is not None
        spread = spreads[name]
        if spread.is_partial:
            local = local.clone()
            torch.distributed.all_reduce(local)
        close(local, expected if spread.dim is None else expected.chunk(n, spread.dim)[rank])


@pytest.mark.ranks
@pytest.mark.parametrize(
    "options",
    [
        TensorParallel(),
        TensorParallel(sequence_parallel=False),
        TensorParallel(overlap="chunks"),
    ],
    ids=["sequence", "whole", "chunks"],
)
def test_styles_work_in_a_plan_of_torch(options: TensorParallel):
    for degree in (1, 3):
        on_ranks(_block, degree, options)


def test_overlap_needs_a_sequence_that_is_cut():
    with pytest.raises(ConfigError, match="Use overlap='none' or sequence_parallel=True"):
        TensorParallel(sequence_parallel=False, overlap="chunks")
    with pytest.raises(ConfigError, match="overlap='chunk' must be 'none' or 'chunks'"):
        TensorParallel(overlap="chunk")  # type: ignore[arg-type]


def _embedding() -> None:
    torch.manual_seed(0)
    mesh = mesh_of_world()
    whole, cut = nn.Embedding(12, 5), nn.Embedding(12, 5)
    cut.load_state_dict(whole.state_dict())
    VocabularyParallel().apply(cut, mesh)
    tokens = torch.arange(12).view(2, 6)
    found = all_gather_dim(cut(tokens), dim=1, group=mesh.get_group())
    assert torch.equal(found, whole(tokens))  # every word once, the first and last of a rank too


@pytest.mark.ranks
def test_every_word_is_looked_up_exactly():
    on_ranks(_embedding, 3)


def _refusals() -> None:
    mesh = mesh_of_world()
    linear = nn.Linear(4, 4)
    ColumnParallel().apply(linear, mesh)
    with pytest.raises(LayoutError, match="Linear has a tensor-parallel style already"):
        RowParallel().apply(linear, mesh)
    with pytest.raises(LayoutError, match=r"it is for nn\.Linear, not Embedding"):
        ColumnParallel().apply(nn.Embedding(4, 4), mesh)
    with pytest.raises(LayoutError, match="padding_idx=0 would act on a part of the rows"):
        VocabularyParallel().apply(nn.Embedding(4, 4, padding_idx=0), mesh)
    shared = SharedInput().apply(nn.Identity(), mesh)
    with pytest.raises(LayoutError, match="first positional argument of Identity"):
        shared(input=torch.zeros(1, 1, 1))
    with pytest.raises(LayoutError, match=r"dim=1 of shape \[1, 3, 4\] does not split evenly"):
        RowParallel().apply(nn.Linear(4, 4), mesh)(torch.zeros(1, 3, 2))


@pytest.mark.ranks
def test_what_a_style_cannot_do_is_refused():
    on_ranks(_refusals, 2)
