from __future__ import annotations

import pytest

from paralign.models.pangu_moe.presets import PRESETS
from paralign.models.pangu_moe.published import PUBLISHED, interleaved
from tests.weights.published import deepseek, deepseek_dense

# Of DeepSeek-V3, as it was published.
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
ITS_OWN = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32},
}


@pytest.mark.parametrize(
    "family",
    [
        deepseek(),
        deepseek(num_expert_groups=1, num_limited_groups=1, router_normalise="none"),
        deepseek(bias_update_speed=0.0, tie_embeddings=True),
        deepseek_dense(),
    ],
)
def test_a_config_comes_back(family) -> None:
    assert PUBLISHED.cannot_write(family[1]) == []
    values, problems = PUBLISHED.read(PUBLISHED.write(family[1]))
    assert problems == []
    assert type(family[1])(**values) == family[1]


def test_the_published_config_is_read_but_for_what_paralign_has_not() -> None:
    values, problems = PUBLISHED.read(DEEPSEEK)
    assert problems == []
    config = type(deepseek()[1])(**values)
    assert config.problems() == []
    assert (config.num_limited_groups, config.shared_hidden_size) == (4, 2048)
    layout = PUBLISHED.layout(config, (), DEEPSEEK)
    # 58 layers of 256 experts; no layers that predict further tokens, no scales of fp8.
    assert len(layout.theirs) == 58 * (256 * 3 + 5 + 9) + 3 * (3 + 9) + 3
    _, problems = PUBLISHED.read(DEEPSEEK | ITS_OWN)
    assert ["yarn" in problems[0], "fp8" in problems[1], len(problems)] == [True, True, 2]


def test_what_is_computed_otherwise_is_refused() -> None:
    changes = {
        "scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 2,
        "rms_norm_eps": 1e-5, "attention_bias": True, "num_key_value_heads": 8, "head_dim": 7,
    }  # fmt: skip
    _, problems = PUBLISHED.read(DEEPSEEK | changes)
    assert {problem.split("=")[0] for problem in problems} == set(changes)
    _, problems = PUBLISHED.read(DEEPSEEK | {"q_lora_rank": None})
    assert problems == ["q_lora_rank is missing"]


def test_presets_say_what_keeps_them_from_being_published() -> None:
    found = {name: PUBLISHED.cannot_write(make()) for name, make in PRESETS.items()}
    named = {name: [text.split("=")[0] for text in texts] for name, texts in found.items()}
    assert named == {
        "tiny": ["norm_eps", "router_normalise"],
        "tiny_dense": ["norm_eps"],
        "demo": ["bias", "norm_eps", "router_normalise"],
        "full": ["bias", "norm_eps", "router_normalise"],
    }


def test_rotary_pairs_become_neighbours() -> None:
    assert interleaved(8) == (0, 2, 4, 6, 1, 3, 5, 7)
