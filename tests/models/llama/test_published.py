from __future__ import annotations

import pytest

from paralign.models.llama.published import PUBLISHED
from tests.weights.published import dense, mixtral

# Of the 8B model of the second generation and of Mixtral 8x7B, as they were published.
LLAMA = {
    "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False,
    "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": True,
    "vocab_size": 32000,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
    "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
}  # fmt: skip


@pytest.mark.parametrize("family", [dense(), dense(tie_embeddings=True), mixtral()])
def test_a_config_comes_back(family) -> None:
    assert PUBLISHED.cannot_write(family[1]) == []
    values, problems = PUBLISHED.read(PUBLISHED.write(family[1]))
    assert problems == []
    assert type(family[1])(**values) == family[1]


def test_published_configs_are_read() -> None:
    values, problems = PUBLISHED.read(LLAMA)
    assert problems == []
    assert (values["num_kv_heads"], values["rope_theta"]) == (32, 10_000.0)
    values, problems = PUBLISHED.read(MIXTRAL)
    assert problems == []
    assert (values["expert_hidden_size"], values["num_experts"]) == (14336, 8)
    assert values["rope_theta"] == 1e6


def test_what_is_computed_otherwise_is_refused() -> None:
    changes = {"attention_bias": True, "mlp_bias": True, "head_dim": 64, "hidden_act": "gelu"}
    _, problems = PUBLISHED.read(LLAMA | changes | {"attention_dropout": 0.1})
    assert [problem.split("=")[0] for problem in problems] == [
        *("hidden_act", "attention_dropout", "head_dim", "attention_bias", "mlp_bias")
    ]
    _, problems = PUBLISHED.read(MIXTRAL | {"sliding_window": 4096, "router_jitter_noise": 0.1})
    assert [problem.split("=")[0] for problem in problems] == [
        *("sliding_window", "router_jitter_noise")
    ]


def test_tensors_of_the_published_size_are_these() -> None:
    values, _ = PUBLISHED.read(MIXTRAL)
    layout = PUBLISHED.layout(type(mixtral()[1])(**values), (), MIXTRAL)
    assert len(layout.theirs) == 995  # as its index lists them
    name = "model.layers.31.block_sparse_moe.experts.7.w2.weight"
    assert layout.theirs[name] == (4096, 14336)
    assert layout.ours["layers.31.ffn.experts.down"] == (8, 4096, 14336)
