"""Geometry from the official config keys, and expert names both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moet.checkpoints import FAMILIES, PROJECTIONS, family_of
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


def test_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(CheckpointError, match=r"MixtralForCausalLM.*Qwen3MoeForCausalLM"):
        family_of({"architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": [{}]}])
def test_config_without_architecture(config):
    with pytest.raises(CheckpointError, match="Supported: DeepseekV3ForCausalLM"):
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
    with pytest.raises(CheckpointError, match=expected):
        geometry(DEEPSEEK_V3 | {key: value})


@given(
    architecture=st.sampled_from(sorted(FAMILIES)),
    layer=st.integers(0, 200),
    expert=st.integers(0, 1000),
    projection=st.sampled_from(PROJECTIONS),
    suffix=st.sampled_from(["weight", "weight_scale", "weight_scale_2", "weight_scale_inv"]),
)
def test_names_parse_back(architecture, layer, expert, projection, suffix):
    family = FAMILIES[architecture]
    name = f"{family.expert_prefix(layer, expert, projection)}.{suffix}"
    assert family.parse_expert(name) == (layer, expert, projection, suffix)


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
