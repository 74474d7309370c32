"""A checkpoint's FP4 twin: the same model in BF16, with the experts' values those of MXFP4.

Where a checkpoint is not FP4, fidelity compares with its experts in MXFP4 by the OCP rule
(`sources.fp4_experts`). BF16 holds those values exactly, so a checkpoint of them goes through all
that a real one does: calibration, packing, serving.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from moet.checkpoints import PROJECTIONS, Checkpoint
from moet.eval.sources import fp4_experts

_OTHER = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_fp4_twin(checkpoint: Checkpoint, directory: Path) -> Path:
    """Writes the twin of a BF16 checkpoint into a new directory, and returns it."""
    directory.mkdir(parents=True)
    for name in _OTHER:
        if (checkpoint.path / name).exists():
            shutil.copy(checkpoint.path / name, directory / name)
    tensors = {
        name: checkpoint.read_tensor(name)
        for name in checkpoint.tensors
        if not checkpoint.is_expert_tensor(name)
    }
    experts, geometry = fp4_experts(checkpoint), checkpoint.geometry
    for layer in geometry.moe_layers:
        for expert in range(geometry.num_experts):
            located = checkpoint.locate(layer, expert)
            for projection, weight in zip(PROJECTIONS, experts(layer, expert), strict=True):
                name = located[projection]["weight"].name
                tensors[name] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
