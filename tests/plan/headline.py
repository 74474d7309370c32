"""The three headline models as checkpoints of headers: every tensor's name, dtype and shape, and
files as long as the real ones, but holes where the weights would be (a few MB on disk).

Geometry and names: the models' published configs and what vLLM's loaders map. The totals are
checked against the published sizes in test_headline.py.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.synthetic import CONFIG

Tensor = tuple[str, str, tuple[int, ...]]  # name, dtype, shape

NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
BITS = {"BF16": 16, "F32": 32, "I64": 64, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E8M0": 8}


def write_headers(path: Path, config: dict[str, Any], tensors: list[Tensor], shards: int) -> Path:
    """A checkpoint directory whose files are sparse."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    table: dict[str, str] = {}
    size = -(-len(tensors) // shards)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        header: dict[str, Any] = {}
        offset = 0
        for name, dtype, shape in tensors[number * size : (number + 1) * size]:
            end = offset + prod(shape) * BITS[dtype] // 8
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset, table[name] = end, file
        raw = json.dumps(header).encode()
        with (path / file).open("wb") as shard:
            shard.write(struct.pack("<Q", len(raw)) + raw)
            shard.truncate(8 + len(raw) + offset)
    index = {"metadata": {}, "weight_map": table}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def deepseek_v4_flash(path: Path, *, drafts: int = 3) -> Path:
    """DeepSeek-V4-Flash, revision 0731 (three draft layers, 72,317 tensors)."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
        "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
        "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
        "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8, "qk_rope_head_dim": 64,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "num_hash_layers": 3, "num_nextn_predict_layers": drafts, "swiglu_limit": 10.0,
        "hidden_act": "silu", "vocab_size": 129280, "max_position_embeddings": 1048576,
        "sliding_window": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
        "compress_ratios": [0, 0, *([4, 128] * 21)[:41]], "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    tensors = [t for i in range(43) for t in _v4_layer(f"layers.{i}.", i, config)]
    tensors += [("embed.weight", "BF16", (129280, 4096)), ("head.weight", "BF16", (129280, 4096))]
    tensors += [("norm.weight", "BF16", (4096,)), *_v4_mixer("hc_head_", 4)]
    for i in range(drafts):
        tensors += _v4_layer(f"mtp.{i}.", -1, config)
    tensors += _fp8("mtp.0.e_proj", 4096, 4096) + _fp8("mtp.0.h_proj", 4096, 4096)
    tensors += [(f"mtp.0.{n}.weight", "BF16", (4096,)) for n in ("enorm", "hnorm", "norm")]
    tensors += _v4_mixer("mtp.0.hc_head_", 4)
    return write_headers(path, config, tensors, 48)


def _v4_layer(p: str, index: int, config: dict[str, Any]) -> list[Tensor]:
    found = [
        *_fp8(f"{p}attn.wq_a", 1024, 4096), *_fp8(f"{p}attn.wq_b", 32768, 1024),
        *_fp8(f"{p}attn.wkv", 512, 4096), *_fp8(f"{p}attn.wo_a", 8192, 4096),
        *_fp8(f"{p}attn.wo_b", 4096, 8192),
        (f"{p}attn.q_norm.weight", "BF16", (1024,)), (f"{p}attn.kv_norm.weight", "BF16", (512,)),
        (f"{p}attn.attn_sink", "F32", (64,)), (f"{p}attn_norm.weight", "BF16", (4096,)),
        (f"{p}ffn_norm.weight", "BF16", (4096,)), (f"{p}ffn.gate.weight", "BF16", (256, 4096)),
        (f"{p}ffn.gate.tid2eid", "I64", (129280, 6)) if 0 <= index < 3
        else (f"{p}ffn.gate.bias", "F32", (256,)),
        *_v4_mixer(f"{p}hc_attn_", 24), *_v4_mixer(f"{p}hc_ffn_", 24),
    ]  # fmt: skip
    for name, n, k in (("w1", 2048, 4096), ("w2", 4096, 2048), ("w3", 2048, 4096)):
        found += _fp8(f"{p}ffn.shared_experts.{name}", n, k)
        for expert in range(256):
            e = f"{p}ffn.experts.{expert}.{name}"
            found += [(f"{e}.weight", "I8", (n, k // 2)), (f"{e}.scale", "F8_E8M0", (n, k // 32))]
    ratio = config["compress_ratios"][index] if index >= 0 else 0
    if ratio:
        found += _v4_compressor(f"{p}attn.compressor.", ratio, 512)
    if ratio == 4:
        found += [*_fp8(f"{p}attn.indexer.wq_b", 8192, 1024),
                  (f"{p}attn.indexer.weights_proj.weight", "BF16", (64, 4096)),
                  *_v4_compressor(f"{p}attn.indexer.compressor.", ratio, 128)]  # fmt: skip
    return found


def _v4_compressor(p: str, ratio: int, width: int) -> list[Tensor]:
    wide = width * (2 if ratio == 4 else 1)
    matrices = [(f"{p}{name}.weight", "BF16", (wide, 4096)) for name in ("wkv", "wgate")]
    return [(f"{p}ape", "F32", (ratio, wide)), *matrices, (f"{p}norm.weight", "BF16", (width,))]


def _v4_mixer(p: str, rows: int) -> list[Tensor]:
    return [(f"{p}fn", "F32", (rows, 16384)), (f"{p}base", "F32", (rows,)),
            (f"{p}scale", "F32", (3 if rows > 4 else 1,))]  # fmt: skip


def _fp8(name: str, n: int, k: int) -> list[Tensor]:
    return [
        (f"{name}.weight", "F8_E4M3", (n, k)),
        (f"{name}.scale", "F8_E8M0", (n // 128, k // 128)),
    ]


def glm_5_2_nvfp4(path: Path) -> Path:
    """GLM-5.2-NVFP4: sparse attention, BF16 everywhere but in the experts of the target layers."""
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
        "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "num_hidden_layers": 78, "num_nextn_predict_layers": 1, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "num_attention_heads": 64, "num_key_value_heads": 64,
        "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
        "index_topk_freq": 4, "index_skip_topk_offset": 3, "hidden_act": "silu",
        "indexer_types": ["shared" if max(i - 2, 0) % 4 else "full" for i in range(78)],
        "vocab_size": 154880, "max_position_embeddings": 1048576,
        "quantization_config": NVFP4,
    }  # fmt: skip
    tensors: list[Tensor] = []
    for i in range(79):
        p = f"model.layers.{i}."
        indexer = i == 78 or config["indexer_types"][i] == "full"  # type: ignore[index]
        tensors += _mla(p, config, indexer=indexer)
        tensors += _ffn(p, config, dense=i < 3, experts="bf16" if i == 78 else "nvfp4")
    p = "model.layers.78."
    tensors += [(f"{p}eh_proj.weight", "BF16", (6144, 12288))]
    tensors += [(f"{p}{n}.weight", "BF16", (6144,)) for n in ("enorm", "hnorm", "shared_head.norm")]
    tensors += _ends("model.", "", 154880, 6144)
    return write_headers(path, config, tensors, 47)


def kimi_k2_7_code_nvfp4(path: Path) -> Path:
    """Kimi-K2.7-Code-NVFP4: DeepSeek-V3's form under `language_model.`, and a vision tower."""
    text = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "hidden_act": "silu", "vocab_size": 163840, "max_position_embeddings": 262144,
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": text, "vision_config": {},
        "quantization_config": NVFP4,
    }  # fmt: skip
    tensors: list[Tensor] = []
    for i in range(61):
        p = f"language_model.model.layers.{i}."
        tensors += [*_mla(p, text), *_ffn(p, text, dense=i < 1, experts="nvfp4")]
    tensors += _ends("language_model.model.", "language_model.", 163840, 7168)
    tensors.append(("vision_tower.patch_embed.proj.weight", "BF16", (1152, 3, 14, 14)))
    for i in range(27):
        p = f"vision_tower.encoder.blocks.{i}."
        shapes = {"wqkv": (3456, 1152), "wo": (1152, 1152)}
        shapes |= {"mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304)}
        tensors += [(f"{p}{name}.weight", "BF16", shape) for name, shape in shapes.items()]
    tensors += [("mm_projector.linear_1.weight", "BF16", (4608, 4608)),
                ("mm_projector.linear_2.weight", "BF16", (7168, 4608))]  # fmt: skip
    return write_headers(path, config, tensors, 60)


def _mla(p: str, c: dict[str, Any], *, indexer: bool = False) -> Iterator[Tensor]:
    hidden, heads, q, kv = (
        c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    )  # fmt: skip
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    a = f"{p}self_attn."
    yield f"{a}q_a_proj.weight", "BF16", (q, hidden)
    yield f"{a}q_a_layernorm.weight", "BF16", (q,)
    yield f"{a}q_b_proj.weight", "BF16", (heads * (nope + rope), q)
    yield f"{a}kv_a_proj_with_mqa.weight", "BF16", (kv + rope, hidden)
    yield f"{a}kv_a_layernorm.weight", "BF16", (kv,)
    yield f"{a}kv_b_proj.weight", "BF16", (heads * (nope + v), kv)
    yield f"{a}o_proj.weight", "BF16", (hidden, heads * v)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{p}{norm}.weight", "BF16", (hidden,)
    if indexer:
        width, count = c["index_head_dim"], c["index_n_heads"]
        yield f"{a}indexer.wq_b.weight", "BF16", (count * width, q)
        yield f"{a}indexer.wk.weight", "BF16", (width, hidden)
        yield f"{a}indexer.k_norm.weight", "BF16", (width,)
        yield f"{a}indexer.k_norm.bias", "BF16", (width,)
        yield f"{a}indexer.weights_proj.weight", "BF16", (count, hidden)


def _ffn(p: str, c: dict[str, Any], *, dense: bool, experts: str) -> Iterator[Tensor]:
    hidden, width = c["hidden_size"], c["moe_intermediate_size"]
    if dense:
        yield from _swiglu(f"{p}mlp.", hidden, c["intermediate_size"])
        return
    yield f"{p}mlp.gate.weight", "BF16", (c["n_routed_experts"], hidden)
    yield f"{p}mlp.gate.e_score_correction_bias", "F32", (c["n_routed_experts"],)
    yield from _swiglu(f"{p}mlp.shared_experts.", hidden, width)
    for expert in range(c["n_routed_experts"]):
        for name, dtype, (n, k) in _swiglu(f"{p}mlp.experts.{expert}.", hidden, width):
            if experts == "bf16":
                yield name, dtype, (n, k)
                continue
            yield name, "U8", (n, k // 2)
            yield f"{name}_scale", "F8_E4M3", (n, k // 16)
            yield f"{name}_scale_2", "F32", ()
            yield f"{name.removesuffix('weight')}input_scale", "F32", ()


def _swiglu(p: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield f"{p}gate_proj.weight", "BF16", (width, hidden)
    yield f"{p}up_proj.weight", "BF16", (width, hidden)
    yield f"{p}down_proj.weight", "BF16", (hidden, width)


def _ends(inner: str, outer: str, vocabulary: int, hidden: int) -> list[Tensor]:
    return [
        (f"{inner}embed_tokens.weight", "BF16", (vocabulary, hidden)),
        (f"{inner}norm.weight", "BF16", (hidden,)),
        (f"{outer}lm_head.weight", "BF16", (vocabulary, hidden)),
    ]


def synthetic(path: Path) -> Path:
    """The model of benchmarks/synthetic.py, with experts in NVFP4."""
    config = CONFIG | {"quantization_config": NVFP4}
    tensors = _ends("model.", "", config["vocab_size"], config["hidden_size"])
    for i in range(config["num_hidden_layers"]):
        tensors += _synthetic_layer(f"model.layers.{i}.", config)
    return write_headers(path, config, tensors, 4)


def _synthetic_layer(p: str, c: dict[str, Any]) -> Iterator[Tensor]:
    hidden, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query, rope = c["q_lora_rank"], c["qk_rope_head_dim"]
    key, value = c["qk_nope_head_dim"], c["v_head_dim"]
    for name, shape in {
        "q_a_proj": (query, hidden),
        "q_b_proj": (heads * (key + rope), query),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (key + value), latent),
        "o_proj": (hidden, heads * value),
    }.items():
        yield f"{p}self_attn.{name}.weight", "BF16", shape
    for name, width in (
        ("self_attn.q_a_layernorm", query),
        ("self_attn.kv_a_layernorm", latent),
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
    ):
        yield f"{p}{name}.weight", "BF16", (width,)
    yield from _ffn(p, c, dense=False, experts="nvfp4")


HEADLINE = {
    "DeepSeek-V4-Flash": deepseek_v4_flash,
    "GLM-5.2-NVFP4": glm_5_2_nvfp4,
    "Kimi-K2.7-Code-NVFP4": kimi_k2_7_code_nvfp4,
}
