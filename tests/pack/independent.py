"""Rows and checkpoints in float64, by the specification alone, with none of moet's decoders."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CODEBOOK = np.array([1.0, 4.0, -1.0, -4.0])  # code = sign << 1 | big


def row_weights(
    row: U8,
    precision: str,
    hidden: int,
    intermediate: int,
    slices: int,
    factor: NDArray[np.float32],
) -> tuple[F64, F64, F64]:
    """gate, up, down of a row, decoded as the docstring of `moet.formats.layout` says."""
    width = intermediate // slices
    tiles = (width // 32) * (hidden // 32)
    code_bytes = 32 * 32 * (2 if precision == "base" else 4) // 8
    scale_bytes = 32 * 32 // (16 if precision == "nvfp4" else 32)
    sizes = [
        2 * tiles * code_bytes,
        2 * tiles * scale_bytes,
        tiles * code_bytes,
        tiles * scale_bytes,
    ]
    gates, ups, downs = [], [], []
    position = 0
    for _ in range(slices):
        sections = []
        for size in sizes:
            sections.append(row[position : position + size])
            position += size
        wide, tall = width // 32, hidden // 32
        codes = _codes(sections[0], precision, (wide, tall, 2))
        scales = _scales(sections[1], precision, (wide, tall, 2))
        gates.append(_join(codes[:, :, 0], scales[:, :, 0], precision))
        ups.append(_join(codes[:, :, 1], scales[:, :, 1], precision))
        codes = _codes(sections[2], precision, (tall, wide))
        downs.append(_join(codes, _scales(sections[3], precision, (tall, wide)), precision))
    gate, up, down = np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, axis=1)
    assert not row[position:].any(), "the padding is not zero"
    return gate * float(factor[0]), up * float(factor[1]), down * float(factor[2])


def _codes(raw: U8, precision: str, tiles: tuple[int, ...]) -> U8:
    """[*tiles, 32 rows, 32 k]."""
    words = np.frombuffer(raw.tobytes(), "<u4")
    out = np.empty((*tiles, 32, 32), np.uint8)
    if precision == "base":
        words = words.reshape(*tiles, 4, 8, 2)
        for c in range(2):
            for j in range(8):
                p = 15 + 16 * (j % 2) - 2 * (2 * (j // 2) + c)
                code = (words >> p & 1) << 1 | words >> ((p - 3) % 32) & 1
                for h in range(2):
                    for t in range(4):
                        out[..., 16 * h + 8 * c : 16 * h + 8 * c + 8, 8 * t + j] = code[
                            ..., t, :, h
                        ]
    else:
        words = words.reshape(*tiles, 4, 8, 2, 2)
        for h in range(2):
            for c in range(2):
                for t in range(4):
                    for j in range(8):
                        code = words[..., t, :, h, c] >> 4 * j & 15
                        out[..., 16 * h + 8 * c : 16 * h + 8 * c + 8, 8 * t + j] = code
    return out


def _scales(raw: U8, precision: str, tiles: tuple[int, ...]) -> U8:
    """[*tiles, 32 rows, 32 / block]."""
    per_row = 2 if precision == "nvfp4" else 1
    stored = raw.reshape(*tiles, per_row, 8, 2, 2)
    out = np.empty((*tiles, 32, per_row), np.uint8)
    for q in range(per_row):
        for h in range(2):
            for c in range(2):
                out[..., 16 * h + 8 * c : 16 * h + 8 * c + 8, q] = stored[..., q, :, h, c]
    return out


def _join(codes: U8, scales: U8, precision: str) -> F64:
    """[groups, blocks, 32, ..] tiles → the matrix [32 groups, 32 blocks] in float64."""
    values = (CODEBOOK if precision == "base" else E2M1)[codes]
    dtype = ml_dtypes.float8_e8m0fnu if precision == "mxfp4" else ml_dtypes.float8_e4m3fn
    weights = values * np.repeat(scales.view(dtype).astype(np.float64), 32 // scales.shape[-1], -1)
    groups, blocks = codes.shape[:2]
    return weights.transpose(0, 2, 1, 3).reshape(32 * groups, 32 * blocks)


def expert_weights(checkpoint: Path, layer: int, expert: int) -> tuple[F64, F64, F64]:
    """gate, up, down of the checkpoint in float64, from its tensors and their formats."""
    return tuple(
        _matrix(checkpoint, f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj")
        for which in ("gate", "up", "down")
    )


def _matrix(checkpoint: Path, prefix: str) -> F64:
    parts = {}
    for suffix in ("weight", "weight_scale", "weight_scale_2", "weight_scale_inv"):
        tensor = _tensor(checkpoint, f"{prefix}.{suffix}")
        if tensor is not None:
            parts[suffix] = tensor
    weight = parts["weight"]
    if "weight_scale_2" in parts:
        low, high = weight.numpy() & 15, weight.numpy() >> 4
        values = E2M1[np.stack([low, high], -1).reshape(weight.shape[0], -1)]
        scale = parts["weight_scale"].double().numpy().repeat(16, 1)
        return values * scale * parts["weight_scale_2"].double().item()
    if "weight_scale_inv" in parts:
        scale = parts["weight_scale_inv"].double().numpy().repeat(128, 0).repeat(128, 1)
        return weight.double().numpy() * scale[: weight.shape[0], : weight.shape[1]]
    return weight.double().numpy()


def _tensor(checkpoint: Path, name: str) -> torch.Tensor | None:
    index = checkpoint / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        files = [json.loads(index.read_text())["weight_map"].get(name)]
    if files[0] is None:
        return None
    with safe_open(checkpoint / files[0], "pt") as opened:
        return opened.get_tensor(name) if name in opened.keys() else None  # noqa: SIM118
