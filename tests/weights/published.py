"""Small published models: ours by the `transformers` library, in float64 throughout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paralign.models.llama import presets as llama
from paralign.models.moe_sizes import MoeSizes
from paralign.models.pangu_moe import presets as pangu_moe
from paralign.models.registry import MODELS

TOKENS = torch.randint(97, (3, 11), generator=torch.Generator().manual_seed(5))


def dense(**changes: Any) -> tuple[str, Any]:
    """Return a llama: grouped-query heads, sizes that all differ."""
    config = replace(
        llama.tiny(), num_layers=2, hidden_size=48, ffn_hidden_size=56, vocab_size=97,
        num_heads=6, num_kv_heads=2, norm_eps=1e-3, rope_theta=500.0,
    )  # fmt: skip
    return "llama", replace(config, **changes)


def mixtral(**changes: Any) -> tuple[str, Any]:
    """Return a llama with experts in every layer."""
    config = dense(num_experts=4, top_k=2, expert_hidden_size=40, balance_loss=0.02)[1]
    return "llama", replace(config, **changes)


def deepseek(**changes: Any) -> tuple[str, Any]:
    """Return a pangu_moe that the published form can say: one dense layer, then experts."""
    config = replace(
        pangu_moe.tiny(), num_layers=3, hidden_size=48, ffn_hidden_size=56, vocab_size=97,
        num_heads=3, q_lora_rank=20, kv_lora_rank=14, qk_nope_head_dim=10, qk_rope_head_dim=8,
        v_head_dim=6, num_experts=8, top_k=3, expert_hidden_size=24, shared_hidden_size=48,
        router_normalise="sum", num_expert_groups=4, num_limited_groups=2, norm_eps=1e-6,
        rope_theta=500.0,
    )  # fmt: skip
    return "pangu_moe", replace(config, **changes)


def deepseek_dense() -> tuple[str, Any]:
    """Return one without experts."""
    names = {field.name for field in fields(MoeSizes)}
    return deepseek(**{name: getattr(llama.tiny(), name) for name in names})


def build(family: tuple[str, Any], *, seed: int = 0) -> nn.Module:
    """Build a model of ours in float64, all of whose tensors differ from what they start as."""
    name, config = family
    model = MODELS[name].build(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in tensors_of(model).items():
            noise = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
            tensor.copy_(noise * 0.2 + (1.0 if "norm" in key else 0.0))
    return model.eval()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and router biases, a tied pair once."""
    buffers = {n: b for n, b in model.named_buffers() if n.endswith("router.bias")}
    return {n: p.detach() for n, p in model.named_parameters()} | buffers


def write(folder: Path, family: tuple[str, Any], model: nn.Module, **entries: Any) -> Path:
    """Write a published model with the maps under test, without the code that exports."""
    name, config = family
    published = MODELS[name].published
    folder.mkdir()
    raw = published.write(config) | {"torch_dtype": "float64"} | entries
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(theirs_of(family, model, raw), folder / "model.safetensors", {"format": "pt"})
    return folder


def theirs_of(family: tuple[str, Any], model: nn.Module, raw: dict[str, Any]) -> dict[str, Tensor]:
    """Return our tensors as they are published, put together part by part in plain steps."""
    name, config = family
    layout = MODELS[name].published.layout(config, (), raw)
    ours = tensors_of(model)
    theirs = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in layout.theirs.items()}
    for part in layout.parts:
        if part.ours.name in layout.zeros:
            continue
        lead = len(part.ours.start) - len(part.shape)
        ranges = [slice(a, a + n) for a, n in zip(part.ours.start[lead:], part.shape, strict=True)]
        index: tuple[int | slice, ...] = (*part.ours.start[:lead], *ranges)
        values = ours[part.ours.name][index]
        if part.order is not None:
            values = torch.stack([values[part.order.index(i)] for i in range(len(part.order))])
        ranges = [slice(a, a + n) for a, n in zip(part.theirs.start, part.shape, strict=True)]
        theirs[part.theirs.name][tuple(ranges)] = values
    return theirs


def need_library() -> None:
    """Skip a test where the library cannot be installed."""
    pytest.importorskip("transformers", reason="transformers 5 needs Python 3.11")


@contextmanager
def in_float64() -> Iterator[None]:
    """Let the library compute in float64 where it asks for float32 by name.

    Its norms, router scores and rotary angles are made in float32 whatever the model's dtype.
    """
    need_library()
    from transformers.models.deepseek_v3 import modeling_deepseek_v3
    from transformers.models.llama import modeling_llama
    from transformers.models.mixtral import modeling_mixtral

    class Wide:
        float = float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    modules = (modeling_llama, modeling_mixtral, modeling_deepseek_v3)
    with ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch.object(module, "torch", Wide()))
        patches.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def library_model(folder: Path, *, dtype: torch.dtype = torch.float64) -> Any:
    """Load a published model with the library; every tensor must be there and be known."""
    need_library()
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model, told = loaded
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        told
    )
    return model.to(dtype).eval()


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    """Return the logits of a model of either side."""
    with torch.no_grad():
        out = model(tokens)
    found: Tensor = out if isinstance(out, Tensor) else out.logits
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())
