"""The stored forms that the supported families publish."""

from __future__ import annotations

from moet.checkpoints.storage import Stack, Storage, StoredPart


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _fp8_block(scale: str) -> Storage:
    """128 × 128 blocks. DeepSeek stores the factors in float32, Qwen in bfloat16."""
    return Storage(
        "fp8_block",
        (
            StoredPart("weight", "weight", ("F8_E4M3",), lambda n, k: (n, k)),
            StoredPart(
                scale,
                "scale_inv",
                ("F32", "BF16"),
                lambda n, k: (_blocks(n, 128), _blocks(k, 128)),
            ),
        ),
    )


BF16 = Storage("bf16", (StoredPart("weight", "weight", ("BF16",), lambda n, k: (n, k)),))

FP8_BLOCK = _fp8_block("weight_scale_inv")
DEEPSEEK_V4_FP8 = _fp8_block("scale")

# NVIDIA ModelOpt's.
NVFP4 = Storage(
    "nvfp4",
    (
        StoredPart("weight", "codes", ("U8",), lambda n, k: (n, k // 2)),
        StoredPart("weight_scale", "scale", ("F8_E4M3",), lambda n, k: (n, k // 16)),
        StoredPart("weight_scale_2", "global_scale", ("F32",), lambda n, k: ()),
    ),
    ignored=("input_scale",),
)

# compressed-tensors' `pack-quantized`. The shape tensor repeats what config.json says.
INT4_GROUP = Storage(
    "int4_group",
    (
        StoredPart("weight_packed", "codes", ("I32",), lambda n, k: (n, k // 8)),
        StoredPart("weight_scale", "scale", ("BF16", "F32"), lambda n, k: (n, k // 32)),
    ),
    ignored=("weight_shape",),
)

DEEPSEEK_V4_FP4 = Storage(
    "mxfp4",
    (
        StoredPart("weight", "codes", ("I8",), lambda n, k: (n, k // 2)),
        StoredPart("scale", "scale", ("F8_E8M0",), lambda n, k: (n, k // 32)),
    ),
)

# gpt-oss: gate and up rows alternate in both forms; in BF16 the matrices are also transposed.
GPT_OSS_MXFP4 = Storage(
    "mxfp4",
    (
        StoredPart("blocks", "codes", ("U8",), lambda n, k: (n, k // 32, 16)),
        StoredPart("scales", "scale", ("U8",), lambda n, k: (n, k // 32)),
    ),
    stack=Stack(transposed=False, interleaved=True),
)
GPT_OSS_BF16 = Storage(
    "bf16",
    (StoredPart("", "weight", ("BF16",), lambda n, k: (n, k)),),
    stack=Stack(transposed=True, interleaved=True),
)

LLAMA4_BF16 = Storage(
    "bf16",
    (StoredPart("", "weight", ("BF16",), lambda n, k: (n, k)),),
    stack=Stack(transposed=True, interleaved=False),
)

PER_EXPERT = (BF16, FP8_BLOCK, NVFP4, INT4_GROUP)
