"""Geometry from the official config keys, and expert names both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.checkpoints import PROJECTIONS, family_of
from moet.errors import CheckpointError

# The keys that matter of the published config.json files.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 4096,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
}
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 43,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 3,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "expert_dtype": "fp4",
}
GLM_5_2 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "hidden_size": 6144,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
}
KIMI_K2_7 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
    },
}
QWEN3_NEXT = QWEN3_30B_A3B | {
    "architectures": ["Qwen3NextForCausalLM"],
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_mtp_modules": 3,
    "hidden_act": "silu",
}
GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
}
LLAMA_4_MAVERICK = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 128,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "interleave_moe_layer_step": 2,
        "hidden_act": "silu",
    },
}


def geometry(config):
    return family_of(config).geometry(config)


def test_deepseek_v3_counts_dense_and_draft_layers():
    found = geometry(DEEPSEEK_V3)
    assert found.moe_layers == tuple(range(3, 62))
    assert found.mtp_layers == (61,)
    assert (found.hidden, found.intermediate) == (7168, 2048)
    assert (found.num_experts, found.top_k, found.num_layers) == (256, 8, 61)
    assert found.swiglu_limit is None


def test_moe_layer_freq_thins_the_sparse_layers():
    assert geometry(DEEPSEEK_V3 | {"moe_layer_freq": 2}).moe_layers == tuple(range(4, 62, 2))


def test_glm_has_one_dense_and_one_draft_layer():
    found = geometry(GLM_4_5_AIR)
    assert found.moe_layers == tuple(range(1, 47))
    assert found.mtp_layers == (46,)


def test_qwen3_is_sparse_throughout():
    assert geometry(QWEN3_30B_A3B).moe_layers == tuple(range(48))
    assert geometry(QWEN3_30B_A3B).mtp_layers == ()


def test_qwen3_sparse_step_counts_from_one():
    config = QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [3, 5]}
    assert geometry(config).moe_layers == (1, *range(7, 48, 2))


def test_deepseek_v4_is_sparse_throughout():
    found = geometry(DEEPSEEK_V4)
    assert found.moe_layers == tuple(range(44))
    assert found.mtp_layers == (43,)
    assert (found.swiglu_limit, found.swiglu_alpha, found.swiglu_beta) == (10.0, 1.0, 0.0)
    # The 0731 revision's drafter has three layers.
    dspark = DEEPSEEK_V4 | {"dspark_target_layer_ids": [20, 41], "dspark_block_size": 5}
    assert geometry(dspark).mtp_layers == (43, 44, 45)


def test_glm_5_2_has_three_dense_layers_and_a_draft():
    found = geometry(GLM_5_2)
    assert found.moe_layers == tuple(range(3, 79))
    assert found.mtp_layers == (78,)


def test_kimi_is_in_its_text_config():
    found = geometry(KIMI_K2_7)
    assert found.architecture == "KimiK25ForConditionalGeneration"
    assert (found.moe_layers, found.mtp_layers) == (tuple(range(1, 61)), ())
    assert (found.num_experts, found.hidden) == (384, 7168)
    with pytest.raises(CheckpointError, match=r"text_config` is missing. Use the config.json"):
        geometry({"architectures": ["KimiK25ForConditionalGeneration"]})


def test_qwen3_next_has_a_draft_that_the_config_does_not_count():
    found = geometry(QWEN3_NEXT)
    assert (found.moe_layers, found.mtp_layers) == (tuple(range(49)), (48,))


def test_minimax_calls_the_experts_width_intermediate_size():
    found = geometry(MINIMAX_M2)
    assert (found.intermediate, found.num_experts) == (1536, 256)
    assert (found.moe_layers, found.mtp_layers) == (tuple(range(65)), (62, 63, 64))


def test_gpt_oss_has_biases_and_an_activation_of_its_own():
    found = geometry(GPT_OSS_120B)
    assert found.biases
    assert (found.swiglu_limit, found.swiglu_alpha, found.swiglu_beta) == (7.0, 1.702, 1.0)


def test_llama4_alternates_and_scales_the_input():
    found = geometry(LLAMA_4_MAVERICK)
    assert found.moe_layers == tuple(range(1, 48, 2))
    assert (found.router_weight_on_input, found.top_k) == (True, 1)
    listed = LLAMA_4_MAVERICK["text_config"] | {"moe_layers": [2, 7]}
    assert geometry(LLAMA_4_MAVERICK | {"text_config": listed}).moe_layers == (2, 7)


def test_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(CheckpointError, match=r"MixtralForCausalLM.*Qwen3MoeForCausalLM"):
        family_of({"architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": [{}]}])
def test_config_without_architecture(config):
    with pytest.raises(CheckpointError, match="Supported: DeepseekV32ForCausalLM, DeepseekV3"):
        family_of(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "7168"),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**12),
        ("n_routed_experts", True),
        ("num_experts_per_tok", 257),
        ("moe_layer_freq", 0),
        ("hidden_act", "gelu"),
        ("first_k_dense_replace", 61),
    ],
)
def test_impossible_key_is_named(key, value):
    expected = "no layer" if key == "first_k_dense_replace" else key
    alone = key in ("first_k_dense_replace", "hidden_act")
    hint = "vLLM alone" if alone else "Use the config.json that the model was published with"
    with pytest.raises(CheckpointError, match=f"{expected}.*{hint}"):
        geometry(DEEPSEEK_V3 | {key: value})


MODELS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v4": DEEPSEEK_V4,
    "glm_4_5_air": GLM_4_5_AIR,
    "gpt_oss": GPT_OSS_120B,
    "kimi_k25": KIMI_K2_7,
    "llama4": LLAMA_4_MAVERICK,
    "minimax_m2": MINIMAX_M2,
    "qwen3_moe": QWEN3_30B_A3B,
    "qwen3_next": QWEN3_NEXT,
}


@given(data=st.data(), model=st.sampled_from(sorted(MODELS)))
def test_names_parse_back(data, model):
    family, found = family_of(MODELS[model]), geometry(MODELS[model])
    layer = data.draw(st.sampled_from(found.moe_layers))
    expert = data.draw(st.integers(0, found.num_experts - 1))
    projection = data.draw(st.sampled_from(PROJECTIONS))
    form = data.draw(st.sampled_from(family.forms))
    for suffix in form.suffixes:
        prefix = family.expert_prefix(found, layer, expert, projection)
        name = family.tensor_name(prefix, suffix)
        expected = (layer, expert, projection, suffix)
        if form.stack is not None:
            expected = (layer, None, "down" if projection == "down" else "gate", suffix)
        assert family.parse_expert(found, name) == expected
        assert family.is_expert_tensor(found, name)
        assert not family.is_expert_tensor(found, f"{name}\n")
        assert not family.is_expert_tensor(found, f"x{name}")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.gate_proj.weight",
        "model.layers.3.mlp.experts.256.gate_proj.weight",  # one expert too many
        "model.layers.2.mlp.experts.0.gate_proj.weight",  # a dense layer
        "model.layers.62.mlp.experts.0.gate_proj.weight",  # past the draft layer
        "model.layers.3.mlp.experts.07.gate_proj.weight",
        "model.layers.3.mlp.experts.7.gate_proj",
        "language_model.model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layers.3.mlp.experts.7.gate_proj.weight\n",
    ],
)
def test_other_tensors_are_not_experts(name):
    family = family_of(DEEPSEEK_V3)
    assert not family.is_expert_tensor(geometry(DEEPSEEK_V3), name)


def test_draft_experts_are_experts():
    family = family_of(DEEPSEEK_V3)
    name = "model.layers.61.mlp.experts.255.down_proj.weight_scale_inv"
    assert family.is_expert_tensor(geometry(DEEPSEEK_V3), name)
