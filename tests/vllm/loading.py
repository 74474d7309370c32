"""vLLM's model class with all its weights, in this process, and the routed experts it would call:
for models whose forward pass has no kernels where the tests run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.utils.network_utils import get_open_port
from vllm.v1.worker.workspace import init_workspace_manager

from moet.checkpoints import Checkpoint
from moet.eval.pack import packed_experts
from moet.formats import Precision
from moet.kernels import SwiGLU
from moet.kernels.reference import gated
from moet.pack import Pack, PackRowSource
from moet.vllm.method import find_runtime, moet_methods


@contextmanager
def loaded(model: Path, settings: dict[str, Any], device: torch.device) -> Iterator[VllmConfig]:
    """Loads `model` with moet onto `device`; its forward pass is never called."""
    config = EngineArgs(
        model=str(model), quantization="moet", dtype="bfloat16", enforce_eager=True,
        max_model_len=256, max_num_seqs=8, skip_tokenizer_init=True,
        kv_cache_memory_bytes=64 << 20, additional_config={"moet": settings},
    ).create_engine_config()  # fmt: skip
    with set_current_vllm_config(config):
        address = f"tcp://127.0.0.1:{get_open_port()}"
        backend = "gloo" if device.type == "cpu" else "nccl"
        init_distributed_environment(1, 0, address, 0, backend)
        initialize_model_parallel(1, 1)
        init_workspace_manager(device)
        try:
            get_model(vllm_config=config)
            yield config
        finally:
            runtime = find_runtime(config)
            if runtime is not None:
                runtime.close()
            cleanup_dist_env_and_memory()


def check_experts(
    config: VllmConfig, model: Path, pack: Path, device: torch.device, attention: Any
) -> None:
    """Every layer's routed experts, called as the model's forward pass would, against float64.

    attention: what stands for the attention's metadata of a step.
    """
    rng = torch.Generator().manual_seed(0)
    with (
        Checkpoint.open(model) as checkpoint,
        PackRowSource(Pack.open(pack), checkpoint) as source,
    ):
        geometry = checkpoint.geometry
        activation = SwiGLU(geometry.swiglu_limit, geometry.swiglu_alpha, geometry.swiglu_beta)
        experts = packed_experts(source, Precision.BASE)
        methods = {method.layer: method for method in moet_methods(config)}
        layers = [of for of in geometry.moe_layers if of not in geometry.mtp_layers]
        assert sorted(methods) == layers
        for tokens in (3, 60):  # decode, prefill
            for layer in layers:  # a pass of the model
                x = torch.randn(tokens, geometry.hidden, generator=rng).bfloat16()
                scores = torch.rand(tokens, geometry.num_experts, generator=rng)
                weights, ids = scores.topk(geometry.top_k)
                found = methods[layer].compute(
                    x.to(device), weights.to(device), ids.to(device, torch.int32), attention
                )
                if geometry.router_weight_on_input:
                    x, weights = x * weights.bfloat16(), torch.ones_like(weights)
                expected = torch.zeros(x.shape, dtype=torch.float64)
                for expert in range(geometry.num_experts):
                    gate, up, down = (of.double() for of in experts(layer, expert))
                    hidden = gated(x.double() @ gate.T, x.double() @ up.T, activation)
                    share = (weights * (ids == expert)).sum(1, keepdim=True)
                    expected += share * (hidden @ down.T)
                error = (found.cpu().double() - expected).norm() / expected.norm()
                assert error < 0.01, (layer, tokens, error)
