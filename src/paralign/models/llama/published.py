"""The llama family in published form: `llama` without experts, `mixtral` with them. No torch.

Rotary features are paired (i, i + D/2) on both sides, and heads are in the same order, so only
names differ; the experts of a layer are one stack here and one tensor each there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paralign.models.llama.presets import LlamaConfig
from paralign.models.published import Layout, Part, Published, Stacks, dense_parts, same
from paralign.models.published_config import OWN, ConfigReader

_THETA = {"llama": 10_000.0, "mixtral": 1_000_000.0}
_EPS = {"llama": 1e-6, "mixtral": 1e-5}


def _write(config: LlamaConfig) -> dict[str, Any]:
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "attention_dropout": 0.0,
    }
    if not config.has_experts:
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            **common,
            "intermediate_size": config.ffn_hidden_size,
            "attention_bias": False,
            "mlp_bias": False,
        }
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        **common,
        "intermediate_size": config.expert_hidden_size,
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.top_k,
        "sliding_window": None,
        OWN: {"ffn_hidden_size": config.ffn_hidden_size, "balance_loss": config.balance_loss},
    }


def _cannot_write(config: LlamaConfig) -> list[str]:
    found = []
    if config.bias:
        found.append("bias=true: the head has a bias, which the published form has not")
    if not config.has_experts:
        return found
    needed = {
        "router_score": ("softmax", "mixtral takes a softmax over all experts"),
        "router_normalise": ("sum", "mixtral divides the selected scores by their sum"),
        "router_scaling": (1.0, "mixtral scales no weights"),
        "shared_hidden_size": (0, "mixtral has no expert that every token passes"),
        "num_dense_layers": (0, "mixtral has experts in every layer"),
        "bias_update_speed": (0.0, "mixtral has no router bias"),
    }
    found += [
        f"{name}={value!r}: {why}"
        for name, (only, why) in needed.items()
        if (value := getattr(config, name)) != only
    ]
    if config.num_limited_groups < config.num_expert_groups:
        found.append(
            f"num_limited_groups={config.num_limited_groups} of num_expert_groups="
            f"{config.num_expert_groups}: mixtral lets a token choose among all experts"
        )
    return found


def _read(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    reader = ConfigReader(raw)
    kind = str(raw["model_type"])
    heads = reader.size("num_attention_heads")
    config: dict[str, Any] = {
        "num_layers": reader.size("num_hidden_layers"),
        "hidden_size": reader.size("hidden_size"),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": reader.size("num_key_value_heads", 8 if kind == "mixtral" else heads),
        "vocab_size": reader.size("vocab_size"),
        "rope_theta": reader.rope_theta(_THETA[kind]),
        "norm_eps": reader.number("rms_norm_eps", _EPS[kind]),
        "tie_embeddings": reader.flag("tie_word_embeddings", False),
        "init_std": reader.number("initializer_range", 0.02) or 0.02,
    }
    reader.only("hidden_act", "silu", why="paralign's feed-forward is gated by silu")
    reader.only("attention_dropout", 0.0, why="paralign drops no attention scores")
    head_dim = config["hidden_size"] // max(1, heads)
    reader.only("head_dim", None, head_dim, why=f"paralign's heads are hidden_size / {heads} wide")
    if kind == "llama":
        for key in ("attention_bias", "mlp_bias"):
            reader.only(key, False, why="paralign has biases on all linear layers or on none")
        return config, reader.finish()
    reader.only("sliding_window", None, why="paralign's attention sees all tokens before")
    reader.only("router_jitter_noise", 0.0, why="paralign adds no noise to routing")
    config |= {
        "num_experts": reader.size("num_local_experts", 8),
        "top_k": reader.size("num_experts_per_tok", 2),
        "expert_hidden_size": config["ffn_hidden_size"],
        "ffn_hidden_size": reader.own("ffn_hidden_size", config["ffn_hidden_size"]),
        "balance_loss": reader.own("balance_loss", 0.0),
    }
    return config, reader.finish()


def _layout(config: LlamaConfig, names: Iterable[str], raw: Mapping[str, Any]) -> Layout:
    hidden, vocab = config.hidden_size, config.vocab_size
    parts = [
        same("embedding.weight", "model.embed_tokens.weight", vocab, hidden),
        same("norm.weight", "model.norm.weight", hidden),
    ]
    if not config.tie_embeddings:
        parts.append(same("head.weight", "lm_head.weight", vocab, hidden))
    kv_width = config.num_kv_heads * config.head_dim
    found = set(names)
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention = f"{theirs}.self_attn"
        parts += [
            same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", hidden),
            same(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", hidden),
            same(f"{ours}.attention.wq.weight", f"{attention}.q_proj.weight", hidden, hidden),
            same(f"{ours}.attention.wk.weight", f"{attention}.k_proj.weight", kv_width, hidden),
            same(f"{ours}.attention.wv.weight", f"{attention}.v_proj.weight", kv_width, hidden),
            same(f"{ours}.attention.wo.weight", f"{attention}.o_proj.weight", hidden, hidden),
        ]
        if config.is_moe_layer(i):
            parts += _experts(config, i, found)
        else:
            parts += dense_parts(f"{ours}.ffn", f"{theirs}.mlp", config.ffn_hidden_size, hidden)
    return Layout(tuple(parts))


def _experts(config: LlamaConfig, layer: int, found: set[str]) -> list[Part]:
    ours = f"layers.{layer}.ffn"
    stacked = f"model.layers.{layer}.mlp"
    is_stacked = f"{stacked}.experts.gate_up_proj" in found
    theirs = stacked if is_stacked else f"model.layers.{layer}.block_sparse_moe"
    stacks = Stacks(
        gate=f"{theirs}.experts.{{}}.w1.weight",
        up=f"{theirs}.experts.{{}}.w3.weight",
        down=f"{theirs}.experts.{{}}.w2.weight",
        gate_up=f"{theirs}.experts.gate_up_proj",
        downs=f"{theirs}.experts.down_proj",
    )
    hidden, num_experts = config.hidden_size, config.num_experts
    return [
        same(f"{ours}.router.gate.weight", f"{theirs}.gate.weight", num_experts, hidden),
        *stacks.parts(
            f"{ours}.experts",
            num_experts=num_experts,
            inner=config.expert_hidden_size,
            outer=hidden,
            is_stacked=is_stacked,
        ),
    ]


PUBLISHED = Published(
    model_types=("llama", "mixtral"),
    write=_write,
    cannot_write=_cannot_write,
    read=_read,
    layout=_layout,
)
