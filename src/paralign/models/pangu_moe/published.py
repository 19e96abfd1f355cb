"""The pangu_moe family in published form, which is `deepseek_v3`'s. No torch.

Rotary features are paired (i, i + D/2) here. There, neighbours (2i, 2i + 1) are a pair, unless
`rope_interleave` is false: rows that make rotary features are put in that order. Queries and the
one key are turned alike, so scores do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paralign.models.pangu_moe.presets import PanguMoeConfig
from paralign.models.published import (
    Layout,
    Part,
    Placed,
    Published,
    Stacks,
    dense_parts,
    same,
)
from paralign.models.published_config import OWN, ConfigReader

LATENT_EPS = 1e-6
"""What the library adds under the root of the norms of both latents, whatever rms_norm_eps says."""
BIAS_SPEED = 0.001
"""Of a router bias whose speed is not known: DeepSeek-V3's own."""


def _write(config: PanguMoeConfig) -> dict[str, Any]:
    limits = config.num_limited_groups < config.num_expert_groups
    entries: dict[str, Any] = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_interleave": True,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
    }
    if not config.has_experts:
        # Every key must be there for the library; none of them is used by a dense layer.
        return entries | {"first_k_dense_replace": config.num_layers, "n_group": 1, "topk_group": 1}
    return entries | {
        "first_k_dense_replace": min(config.num_dense_layers, config.num_layers),
        "moe_layer_freq": 1,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_hidden_size // config.expert_hidden_size,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.expert_hidden_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": config.router_normalise == "sum",
        "routed_scaling_factor": config.router_scaling,
        "n_group": config.num_expert_groups if limits else 1,
        "topk_group": config.num_limited_groups if limits else 1,
        OWN: {
            "balance_loss": config.balance_loss,
            "bias_update_speed": config.bias_update_speed,
        },
    }


def _cannot_write(config: PanguMoeConfig) -> list[str]:
    found = []
    if config.bias:
        found.append(
            "bias=true: queries, feed-forwards and the head have biases, which the "
            "published form has not"
        )
    if config.norm_eps != LATENT_EPS:
        found.append(
            f"norm_eps={config.norm_eps!r}: deepseek_v3 takes {LATENT_EPS!r} for the norms of the "
            "latents, whatever its rms_norm_eps is"
        )
    return found + (_experts_cannot(config) if config.has_experts else [])


def _experts_cannot(config: PanguMoeConfig) -> list[str]:
    found = []
    if config.router_score != "sigmoid":
        found.append(f"router_score={config.router_score!r}: deepseek_v3 takes sigmoids")
    if config.router_normalise == "softmax":
        found.append(
            "router_normalise='softmax': deepseek_v3 divides the selected scores by their sum, or "
            "takes them as they are"
        )
    shared, inner = config.shared_hidden_size, config.expert_hidden_size
    if shared == 0 or shared % inner:
        found.append(
            f"shared_hidden_size={shared}: deepseek_v3 has a shared expert whose width is a "
            f"multiple of expert_hidden_size={inner}"
        )
    groups = config.num_expert_groups
    if config.num_limited_groups < groups and config.num_experts // groups < 2:
        found.append(
            f"num_expert_groups={groups} of num_experts={config.num_experts}: deepseek_v3 ranks a "
            "group by its best two experts, and a group has one"
        )
    return found


def _read(raw: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    reader = ConfigReader(raw)
    heads, layers = reader.size("num_attention_heads"), reader.size("num_hidden_layers")
    config: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": reader.size("hidden_size"),
        "ffn_hidden_size": reader.size("intermediate_size"),
        "num_heads": heads,
        "q_lora_rank": reader.size("q_lora_rank"),
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_nope_head_dim": reader.size("qk_nope_head_dim"),
        "qk_rope_head_dim": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
        "vocab_size": reader.size("vocab_size"),
        "rope_theta": reader.rope_theta(10_000.0),
        "norm_eps": reader.number("rms_norm_eps", LATENT_EPS),
        "tie_embeddings": reader.flag("tie_word_embeddings", False),
        "init_std": reader.number("initializer_range", 0.02) or 0.02,
    }
    reader.flag("rope_interleave", True)  # asked for by _layout
    reader.only("hidden_act", "silu", why="paralign's feed-forward is gated by silu")
    reader.only("attention_bias", False, why="paralign has biases on all linear layers or on none")
    reader.only("attention_dropout", 0.0, why="paralign drops no attention scores")
    reader.only("num_key_value_heads", None, heads, why="every query head has its own")
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    reader.only("head_dim", None, rope, why="it is qk_rope_head_dim")
    reader.only("qk_head_dim", None, rope + nope, why="it is the sum of the two")
    reader.only(
        "rms_norm_eps",
        LATENT_EPS,
        why=f"the library takes {LATENT_EPS!r} for the norms of the latents all the same, and "
        "paralign one number for all norms",
    )
    dense = reader.size("first_k_dense_replace", 3)
    config |= _read_experts(reader, dense) if dense < layers else _pass_experts(reader)
    return config, reader.finish()


def _read_experts(reader: ConfigReader, dense: int) -> dict[str, Any]:
    reader.only("scoring_func", "sigmoid", why="paralign reads deepseek_v3's sigmoid scores")
    reader.only("topk_method", "noaux_tc", why="paralign reads deepseek_v3's selection by biases")
    reader.only("moe_layer_freq", 1, why="in paralign every layer after the dense ones has experts")
    inner = reader.size("moe_intermediate_size")
    return {
        "num_dense_layers": dense,
        "num_experts": reader.size("n_routed_experts"),
        "top_k": reader.size("num_experts_per_tok"),
        "expert_hidden_size": inner,
        "shared_hidden_size": inner * reader.size("n_shared_experts"),
        "router_score": "sigmoid",
        "router_normalise": "sum" if reader.flag("norm_topk_prob", True) else "none",
        "router_scaling": reader.number("routed_scaling_factor", 2.5),
        "num_expert_groups": reader.size("n_group", 8),
        "num_limited_groups": reader.size("topk_group", 4),
        "balance_loss": reader.own("balance_loss", 0.0),
        "bias_update_speed": reader.own("bias_update_speed", BIAS_SPEED),
    }


def _pass_experts(reader: ConfigReader) -> dict[str, Any]:
    """Look at keys about experts that no layer has: they say nothing."""
    for key in ("moe_intermediate_size", "n_group", "topk_group", "n_routed_experts"):
        reader.size(key, 1)
    for key in ("num_experts_per_tok", "n_shared_experts", "moe_layer_freq"):
        reader.size(key, 1)
    reader.flag("norm_topk_prob", True)
    reader.number("routed_scaling_factor", 1.0)
    reader.only("scoring_func", "sigmoid", "softmax", why="it is no score")
    reader.only("topk_method", "noaux_tc", "greedy", why="it is no selection")
    return {}


def _layout(config: PanguMoeConfig, names: Iterable[str], raw: Mapping[str, Any]) -> Layout:
    hidden, vocab = config.hidden_size, config.vocab_size
    parts = [
        same("embedding.weight", "model.embed_tokens.weight", vocab, hidden),
        same("norm.weight", "model.norm.weight", hidden),
    ]
    if not config.tie_embeddings:
        parts.append(same("head.weight", "lm_head.weight", vocab, hidden))
    found, is_interleaved = set(names), bool(raw.get("rope_interleave", True))
    biases: dict[str, str] = {}
    for i in range(config.num_layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        parts += [
            same(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", hidden),
            same(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", hidden),
            *_attention(config, f"{ours}.attention", f"{theirs}.self_attn", is_interleaved),
        ]
        if config.is_moe_layer(i):
            parts += _experts(config, i, found)
            biases[f"{theirs}.mlp.gate.e_score_correction_bias"] = f"{ours}.ffn.router.bias"
        else:
            parts += dense_parts(f"{ours}.ffn", f"{theirs}.mlp", config.ffn_hidden_size, hidden)
    # Routers that are not balanced by a bias have none; there, it is zero.
    zeros = () if config.bias_update_speed else biases.values()
    return Layout(tuple(parts), stays_float32=frozenset(biases), zeros=frozenset(zeros))


def _attention(config: PanguMoeConfig, ours: str, theirs: str, is_interleaved: bool) -> list[Part]:
    hidden, heads = config.hidden_size, config.num_heads
    q_rank, kv_rank, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    nope, width = config.qk_nope_head_dim, config.qk_head_dim
    turned = interleaved(rope) if is_interleaved else tuple(range(rope))
    of_a_head = (*range(nope), *(nope + row for row in turned))
    queries = tuple(head * width + row for head in range(heads) for row in of_a_head)
    both = tuple(range(kv_rank)) + tuple(kv_rank + row for row in turned)
    q_up, kv_down = f"{ours}.q_up.weight", f"{ours}.kv_down.weight"
    at = (0, 0)
    kv_width = heads * (nope + config.v_head_dim)
    out_width = heads * config.v_head_dim
    return [
        same(f"{ours}.q_down.weight", f"{theirs}.q_a_proj.weight", q_rank, hidden),
        same(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", q_rank),
        Part(
            Placed(q_up, at),
            Placed(f"{theirs}.q_b_proj.weight", at),
            (heads * width, q_rank),
            order=queries if is_interleaved else None,
        ),
        # First the latent, then the rotary key, on both sides.
        Part(
            Placed(kv_down, at),
            Placed(f"{theirs}.kv_a_proj_with_mqa.weight", at),
            (kv_rank + rope, hidden),
            order=both if is_interleaved else None,
        ),
        same(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", kv_rank),
        same(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", kv_width, kv_rank),
        same(f"{ours}.out.weight", f"{theirs}.o_proj.weight", hidden, out_width),
    ]


def interleaved(width: int) -> tuple[int, ...]:
    """Return where each rotary feature is if pairs are neighbours: 0, 2, 4, .. 1, 3, 5, .."""
    return (*range(0, width, 2), *range(1, width, 2))


def _experts(config: PanguMoeConfig, layer: int, found: set[str]) -> list[Part]:
    ours, theirs = f"layers.{layer}.ffn", f"model.layers.{layer}.mlp"
    hidden, num_experts = config.hidden_size, config.num_experts
    stacks = Stacks(
        gate=f"{theirs}.experts.{{}}.gate_proj.weight",
        up=f"{theirs}.experts.{{}}.up_proj.weight",
        down=f"{theirs}.experts.{{}}.down_proj.weight",
        gate_up=f"{theirs}.experts.gate_up_proj",
        downs=f"{theirs}.experts.down_proj",
    )
    shared = f"{theirs}.shared_experts"
    return [
        same(f"{ours}.router.gate.weight", f"{theirs}.gate.weight", num_experts, hidden),
        same(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias", num_experts),
        *stacks.parts(
            f"{ours}.experts",
            num_experts=num_experts,
            inner=config.expert_hidden_size,
            outer=hidden,
            is_stacked=stacks.gate_up in found,
        ),
        *dense_parts(f"{ours}.shared", shared, config.shared_hidden_size, hidden),
    ]


PUBLISHED = Published(
    model_types=("deepseek_v3",),
    write=_write,
    cannot_write=_cannot_write,
    read=_read,
    layout=_layout,
)
