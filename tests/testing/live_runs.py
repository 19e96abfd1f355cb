"""What the tests of assert_aligned run, here and on ranks: importable without pytest."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from paralign.testing import assert_aligned


def model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        dtype
    )


def backward(net: nn.Module, x: Tensor, total: int) -> None:
    (net(x).square().sum() / total).backward()


def reference(dtype: torch.dtype = torch.float64) -> nn.Module:
    net = model(dtype=dtype)
    backward(net, rows(dtype), 8)
    return net


def fsdp_run(fault: str | None) -> dict[str, Any]:
    """Shard over two ranks, each with half of the rows, and hold it against one device."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = model()
    fully_shard(net, mesh=mesh)
    own = rows().chunk(2)[dist.get_rank()]
    backward(net, own, 8 if fault == "factor" else 4)  # FSDP averages over the ranks
    report = assert_aligned(reference(), net, mesh=mesh)
    return {"verdict": report.verdict, "compared": report.coverage.compared}


def plain_run(reduce: bool) -> str:
    """Data parallel by hand: copies of the model, gradients summed or forgotten."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    net = copy.deepcopy(model())
    backward(net, rows().chunk(2)[dist.get_rank()], 8)
    for parameter in net.parameters():
        if reduce and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    gradients = {name: p.grad for name, p in reference().named_parameters()}
    return assert_aligned(gradients, net, mesh=mesh).verdict
