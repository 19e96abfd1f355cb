"""Filled models and batches for the model tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paralign.models.registry import find_model
from paralign.randomness import Init, fill_


def tiny(
    name: str, preset: str | None = None, **hyper_parameters: Any
) -> tuple[nn.Module, Any, Any]:
    """Return (model, config, blueprint) in float64; nothing in it is zero or one by accident.

    Without a preset the layers are dense.
    """
    entry = find_model(name)
    dense = {"llama": "tiny", "pangu_moe": "tiny_dense"}
    config = entry.configure(preset or dense[name], hyper_parameters)
    model = entry.build(config).double()
    fill_everything(model)
    return model, config, entry.blueprint(config)


def fill_everything(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name
        init = Init.normal(mean=1.0 if is_norm else 0.0, std=0.2)
        shape = tuple(parameter.shape)
        fill_(parameter, init, seed=0, name=name, global_shape=shape, offsets=(0,) * len(shape))


def batch(rows: int = 2, seq_len: int = 16, vocab: int = 256) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (rows, seq_len), generator=generator)
    return {"tokens": tokens, "positions": torch.arange(seq_len).repeat(rows, 1)}


def take(batch: dict[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """Return the positions ``index`` of every row."""
    return {name: tensor[:, index] for name, tensor in batch.items()}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def linear(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    out = torch.einsum("bsi,oi->bso", x, parameters[f"{name}.weight"])
    return out + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else out


def swiglu(x: Tensor, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    gate, up = linear(x, parameters, f"{name}.gate"), linear(x, parameters, f"{name}.up")
    return linear(gate / (1 + torch.exp(-gate)) * up, parameters, f"{name}.down")


def turn(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions as complex numbers; ``x`` is [B, S, N, D]."""
    width = x.shape[-1]
    frequencies = torch.tensor(
        [theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64
    )
    angles = positions[:, :, None, None] * frequencies
    numbers = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    turned = numbers * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; q, k [B, S, N, D], v [B, S, N, D_v]; returns [B, S, N * D_v]."""
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / q.shape[-1] ** 0.5
    visible = torch.arange(q.shape[1])[:, None] >= torch.arange(k.shape[1])[None, :]
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * visible
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2)
