"""KV bytes against vLLM's own specifications of its caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from moet.errors import CheckpointError
from moet.plan.kv import absorbed_bytes, kv_cache

GQA = {
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "hidden_size": 2048,
}  # fmt: skip
MLA = {
    "num_hidden_layers": 3, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "hidden_size": 2048,
}  # fmt: skip

DSA = {
    **MLA,
    "index_topk": 2048,
    "index_head_dim": 128,
    "indexer_types": ["full", "shared", "full"],
}
LINEAR = {
    **GQA, "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
DEEPSEEK_V4 = {
    "num_hidden_layers": 3, "head_dim": 512, "compress_ratios": [0, 4, 128], "sliding_window": 128,
    "index_head_dim": 128, "index_topk": 512,
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_grouped_query_as_vllm(tp: int) -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=max(1, 4 // tp), head_size=128, dtype=torch.bfloat16
    )
    ours = kv_cache(GQA, tp=tp)
    assert ours.per_token == 4 * spec.page_size_bytes / 16
    assert kv_cache(GQA, tp=tp, dtype="fp8").per_token == ours.per_token / 2


def test_latent_as_vllm_and_whole_on_every_rank() -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    for tp in (1, 4):
        assert kv_cache(MLA, tp=tp).per_token == 3 * spec.page_size_bytes / 16
    assert kv_cache(MLA, drafts=1).per_token == 4 * spec.page_size_bytes / 16
    assert absorbed_bytes(MLA, 1) == 4 * absorbed_bytes(MLA, 4) == 3 * 512 * 16 * 256 * 2


def test_sparse_latent_as_vllm() -> None:
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.uint8, state_content_bytes=656
    )
    key = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    ours = kv_cache(DSA, dtype="fp8")
    assert ours.per_token == (3 * spec.page_size_bytes + 2 * key.page_size_bytes) / 64
    # A step reads every key of the indexers, but records of 2,048 tokens at most.
    assert ours.read_bytes(100_000, 1) == 100_000 * 2 * 132 + 2048 * 3 * 656
    assert ours.read_bytes(1000, 2) == 2 * ours.nbytes(1000, 1)
    frequency = {**DSA, "index_topk_freq": 2, "index_skip_topk_offset": 1}
    del frequency["indexer_types"]
    assert kv_cache(frequency, dtype="fp8").per_token == ours.per_token


def test_windows_and_recurrent_states_do_not_grow() -> None:
    sliding = {**GQA, "layer_types": ["sliding_attention", "full_attention"] * 2}
    sliding["sliding_window"] = 128
    ours = kv_cache(sliding)
    assert ours.per_token == kv_cache(GQA).per_token / 2
    assert ours.per_stream == 128 * ours.per_token
    hybrid = kv_cache(LINEAR)
    assert hybrid.per_token == kv_cache(GQA).per_token / 4
    assert hybrid.per_stream == 3 * (32 * 128 * 128 * 4 + 3 * (2 * 2048 + 4096) * 2)


def test_context_is_the_inverse_of_bytes() -> None:
    cache = kv_cache(GQA)
    assert cache.context(cache.nbytes(5000, 3), 3) == 5000
    assert cache.context(-1, 1) == 0


def test_a_config_without_what_it_needs_is_refused_by_key() -> None:
    with pytest.raises(CheckpointError, match="num_attention_heads"):
        kv_cache({"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="compress_ratios"):
        kv_cache({"num_hidden_layers": 2, "head_dim": 512, "compress_ratios": [4]})


@settings(max_examples=200)
@given(
    st.sampled_from([GQA, MLA, DSA, DEEPSEEK_V4, LINEAR]),
    st.data(),
    st.sampled_from([None, True, -1, 0, 2**70, 1.5, "7", [], ["full", 3], {}, [4, "x", None]]),
)
def test_a_strange_config_is_counted_or_refused(
    config: dict[str, object], data: st.DataObject, value: object
) -> None:
    key = data.draw(st.sampled_from(sorted(config)))
    try:
        cache = kv_cache({**config, key: value}, dtype="fp8", tp=2)
    except CheckpointError:
        return
    assert 0 <= cache.read_bytes(1000, 1) <= cache.nbytes(1000, 1)
