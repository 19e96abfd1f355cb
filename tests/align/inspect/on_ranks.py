"""Data parallel by hand on two ranks, recorded, with one mistake each; needs no pytest."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import paralign as pa

FAULTS = ("none", "unreduced", "same_rows", "own_seed", "summed_norm", "lost_parameter")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 50)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.embed(tokens)))
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100
        )


def record_runs(folder: Path) -> None:
    """Record one run for every fault, in the same world."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for fault in FAULTS:
        _record(folder / fault, fault, mesh)


def _record(folder: Path, fault: str, mesh: object) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank if fault == "own_seed" else 0)
    net = Net().double()
    held = [p for n, p in net.named_parameters() if (fault, n) != ("lost_parameter", "head.bias")]
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    tokens = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(5))
    labels = torch.cat([tokens[:, 1:], torch.full((4, 1), -100)], dim=1)
    rows = slice(0, 2) if fault == "same_rows" else slice(2 * rank, 2 * rank + 2)
    with pa.record(
        folder,
        net,
        mesh=mesh,
        optimizer=optimizer,
        what=("loss", "norm", "params", "grads", "optimizer", "inputs"),
        facts={"global_batch": 4, "seq_len": 12},
    ) as recorder:
        recorder.inputs(tokens[rows], labels[rows])
        loss = net(tokens[rows], labels[rows]) / 44
        loss.backward()
        recorder.loss(loss * 44, tokens=22, reduction="sum", scope="local")
        for name, parameter in net.named_parameters():
            if parameter.grad is not None and (fault, name) != ("unreduced", "norm.weight"):
                dist.all_reduce(parameter.grad)
        if fault == "summed_norm":
            recorder.gradients()
            recorder.norm(_norm_summed_over_copies(net))
        else:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


def _norm_summed_over_copies(net: nn.Module) -> Tensor:
    squares = sum(p.grad.square().sum() for p in net.parameters() if p.grad is not None)
    total = torch.as_tensor(squares)
    dist.all_reduce(total)
    return total.sqrt()
