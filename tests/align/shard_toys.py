"""A model whose tensors are cut by hand, in the ways of Megatron and its relatives.

Its loss is a sum over single elements, so that a shard's gradient is the shard of the gradient
whatever it is cut over: what is tested is where pieces belong, not how they are computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from paralign.align.fused import Fused

HEADS, KV, HEAD = 8, 4, 3
HIDDEN, FFN, VOCAB = 5, 6, 11

FUSED_NAMES = {
    "*.wqkv": Fused({"*.wq": HEADS // KV, "*.wk": 1, "*.wv": 1}, groups=KV),
    "*.gate_up": Fused({"*.gate": 1, "*.up": 1}),
}
SHARDS: dict[str, dict[str, Any]] = {
    "*.wqkv": {"tp": Shard(0)},
    "*.gate_up": {"tp": Shard(0)},
    "*.wo": {"tp": 1},
    "embed": {"tp": Shard(-2)},
}


class ElementWise(nn.Module):
    """Parameters whose loss is the sum of the cubes of their elements."""

    def forward(self) -> Tensor:
        return torch.stack([(p**3).sum() for p in self.parameters()]).sum()


class Layer(ElementWise):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


class Model(ElementWise):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(
                {
                    name.rpartition(".")[2]: tensor
                    for name, tensor in tensors.items()
                    if name.startswith(f"layers.{number}.")
                }
            )
            for number in range(2)
        )
        self.embed = nn.Parameter(tensors["embed"].clone())


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found: dict[str, Tensor] = {}
    for layer in range(2):
        found |= {
            f"layers.{layer}.wq": draw(HEADS * HEAD, HIDDEN),
            f"layers.{layer}.wk": draw(KV * HEAD, HIDDEN),
            f"layers.{layer}.wv": draw(KV * HEAD, HIDDEN),
            f"layers.{layer}.wo": draw(HIDDEN, HEADS * HEAD),
            f"layers.{layer}.gate": draw(FFN, HIDDEN),
            f"layers.{layer}.up": draw(FFN, HIDDEN),
            f"layers.{layer}.norm": draw(HIDDEN),
        }
    return {**found, "embed": draw(VOCAB, HIDDEN)}


def sharded_tensors(at: int, degree: int) -> dict[str, Tensor]:
    """Cut and fuse the tensors for one tp rank, written down independently of the rules."""
    whole = whole_tensors()
    found: dict[str, Tensor] = {}
    for layer in range(2):
        q = whole[f"layers.{layer}.wq"].view(KV, -1, HIDDEN)
        k = whole[f"layers.{layer}.wk"].view(KV, -1, HIDDEN)
        v = whole[f"layers.{layer}.wv"].view(KV, -1, HIDDEN)
        qkv = torch.cat([q, k, v], dim=1).chunk(degree)[at].reshape(-1, HIDDEN)
        gate = whole[f"layers.{layer}.gate"].chunk(degree)[at]
        up = whole[f"layers.{layer}.up"].chunk(degree)[at]
        found |= {
            f"layers.{layer}.wqkv": qkv,
            f"layers.{layer}.gate_up": torch.cat([gate, up]),
            f"layers.{layer}.wo": whole[f"layers.{layer}.wo"].chunk(degree, 1)[at],
            f"layers.{layer}.norm": whole[f"layers.{layer}.norm"],
        }
    return {**found, "embed": whole["embed"].tensor_split(degree)[at]}


def train(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model().backward()
    optimizer.step()
