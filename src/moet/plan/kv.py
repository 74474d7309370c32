"""Bytes of the KV cache, from config.json: what vLLM 0.32 stores for each kind of attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moet.errors import CheckpointError

# Bytes of one token's record in vLLM's packed FP8 formats of latent attention, and of the sparse
# indexer's key: 128 FP8 values and a float32 scale (flashmla_sparse.py, deepseek_v2.py).
_FP8_DS_MLA = 656
_FP8_DEEPSEEK_V4 = 584

KV_DTYPES = {"auto": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class KvCache:
    """Bytes on one rank.

    kind: of attention. per_token: that every token of context adds. per_stream: that a request
    takes besides, whatever its length (sliding windows, recurrent states). A decode step reads
    per_stream, `scanned` for every token of context, and per_token − scanned for `attended` of them
    at most (sparse attention; None: all).
    """

    kind: str
    per_token: float
    per_stream: int
    scanned: float = 0.0
    attended: int | None = None

    def nbytes(self, context: int, streams: int) -> int:
        return round(streams * (context * self.per_token + self.per_stream))

    def read_bytes(self, context: int, streams: int) -> int:
        """Bytes that one decode step of `streams` requests reads."""
        attended = context if self.attended is None else min(context, self.attended)
        each = context * self.scanned + attended * (self.per_token - self.scanned)
        return round(streams * (each + self.per_stream))

    def context(self, nbytes: int, streams: int) -> int:
        """The longest context of each of `streams` requests that `nbytes` hold."""
        left = nbytes / streams - self.per_stream
        return max(0, int(left / self.per_token)) if self.per_token else 0


def kv_cache(
    text: Mapping[str, Any], *, dtype: str = "auto", tp: int = 1, drafts: int = 0
) -> KvCache:
    """The KV cache of a model.

    Args:
        text: the language model's config (`inventory.text_config`).
        dtype: vLLM's --kv-cache-dtype: auto (BF16), bfloat16 or fp8.
        tp: tensor-parallel ranks. Latent attention keeps the whole cache on each.
        drafts: draft layers that are served.
    """
    layers = _integer(text, "num_hidden_layers")
    if "compress_ratios" in text or text.get("model_type") == "deepseek_v4":
        return _deepseek_v4(text, layers, drafts, dtype)
    if "kv_lora_rank" in text:
        return _latent(text, layers, drafts, dtype)
    return _grouped(text, layers, drafts, dtype, tp)


def _latent(text: Mapping[str, Any], layers: int, drafts: int, dtype: str) -> KvCache:
    width = _integer(text, "kv_lora_rank") + _integer(text, "qk_rope_head_dim")
    if "index_topk" not in text:
        return KvCache("latent (MLA)", (layers + drafts) * width * KV_DTYPES[dtype], 0)
    record = _FP8_DS_MLA if dtype == "fp8" else 2 * width
    indexers = _full_indexers(text, layers) + drafts
    key = _indexer_key(text)
    per_token = (layers + drafts) * record + indexers * key
    kind = "latent, sparse (DSA)"
    return KvCache(kind, per_token, 0, indexers * key, _integer(text, "index_topk"))


def _full_indexers(text: Mapping[str, Any], layers: int) -> int:
    """Layers with an indexer of their own; the others share the choice of the one before."""
    types = text.get("indexer_types")
    if isinstance(types, Sequence) and not isinstance(types, str):
        return sum(kind == "full" for kind in types[:layers])
    every = _integer(text, "index_topk_freq", 1)
    offset = _integer(text, "index_skip_topk_offset", 2)
    return sum(max(i - offset + 1, 0) % every == 0 for i in range(layers))


def _indexer_key(text: Mapping[str, Any]) -> int:
    width = _integer(text, "index_head_dim", 128)
    return width + width // 128 * 4


def _deepseek_v4(text: Mapping[str, Any], layers: int, drafts: int, dtype: str) -> KvCache:
    """Every layer has a sliding window; some add a compressed cache, with one record for `ratio`
    tokens, and the state of the compressor that makes it (attention.py, compressor.py)."""
    head = _integer(text, "head_dim")
    ratios = text.get("compress_ratios")
    known = isinstance(ratios, list) and all(type(r) is int and 0 <= r <= 2**20 for r in ratios)
    if not isinstance(ratios, list) or not known or len(ratios) < layers:
        raise CheckpointError(
            f"config.json: `compress_ratios` must name a ratio for each of {layers} layers."
        )
    record = 2 * head if dtype == "bfloat16" else _FP8_DEEPSEEK_V4
    key, window = _indexer_key(text), _integer(text, "sliding_window", 128)
    per_token, scanned, per_stream = 0.0, 0.0, 0
    for ratio in [*ratios[:layers], *([0] * drafts)]:
        per_stream += window * record
        if ratio > 1:
            overlapping = 2 if ratio == 4 else 1
            width = head + (_integer(text, "index_head_dim", 128) if ratio == 4 else 0)
            per_stream += overlapping * ratio * 2 * overlapping * width * 4
            # Ratio 4 has an indexer that chooses among its records; higher ratios read them all.
            per_token += (record + (key if ratio == 4 else 0)) / ratio
            scanned += (key if ratio == 4 else record) / ratio
    attended = 4 * _integer(text, "index_topk", 512)
    return KvCache("latent, compressed", per_token, per_stream, scanned, attended)


def _grouped(text: Mapping[str, Any], layers: int, drafts: int, dtype: str, tp: int) -> KvCache:
    heads = _integer(text, "num_attention_heads")
    kv_heads = _integer(text, "num_key_value_heads", heads)
    width = _integer(text, "head_dim", 0) or _integer(text, "hidden_size") // heads
    per_layer = 2 * max(1, kv_heads // tp) * width * KV_DTYPES[dtype]
    kinds = _layer_kinds(text, layers)
    full = kinds.count("full_attention") + drafts
    sliding = kinds.count("sliding_attention")
    linear = kinds.count("linear_attention")
    window = _integer(text, "sliding_window", 0)
    per_stream = sliding * window * per_layer + (linear and linear * _recurrent_state(text, tp))
    kind = "grouped-query" + (", linear" if linear else "") + (", sliding" if sliding else "")
    return KvCache(kind, full * per_layer, per_stream)


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """full_attention, sliding_attention or linear_attention, for each layer."""
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) >= layers:
        known = ("sliding_attention", "linear_attention")
        return [kind if kind in known else "full_attention" for kind in kinds[:layers]]
    every = _integer(text, "full_attention_interval", 0)
    if every:
        return [
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)
        ]
    return ["full_attention"] * layers


def _recurrent_state(text: Mapping[str, Any], tp: int) -> int:
    """Convolution (BF16) and recurrent (float32) state of a gated delta-net layer, a request."""
    keys = _integer(text, "linear_num_key_heads") * _integer(text, "linear_key_head_dim")
    heads, width = _integer(text, "linear_num_value_heads"), _integer(text, "linear_value_head_dim")
    kernel = _integer(text, "linear_conv_kernel_dim", 4)
    convolution = (kernel - 1) * (2 * keys + heads * width) * 2
    recurrent = heads * width * _integer(text, "linear_key_head_dim") * 4
    return -(-(convolution + recurrent) // tp)


def absorbed_bytes(text: Mapping[str, Any], tp: int) -> int:
    """Bytes of the BF16 copies of `kv_b_proj` that vLLM's latent attention makes beside it, a rank
    (W_UK and W_UV in mla_attention.py); 0 for other attention."""
    if "kv_lora_rank" not in text:
        return 0
    width = _integer(text, "qk_nope_head_dim") + _integer(text, "v_head_dim")
    heads = -(-_integer(text, "num_attention_heads") // tp)
    return _integer(text, "num_hidden_layers") * _integer(text, "kv_lora_rank") * heads * width * 2


def hidden_size(text: Mapping[str, Any]) -> int:
    """The width of the model's activations."""
    return _integer(text, "hidden_size")


def _integer(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the config, or `default` where it is null or absent."""
    value = text.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 2**24:
        raise CheckpointError(f"config.json: `{key}` is {value!r}; an integer ≥ 1 is meant.")
    return value
