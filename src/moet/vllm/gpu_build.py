"""Making a rank's runtime on a GPU: tiers sized and filled, kernels compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.logger import init_logger

from moet.errors import ConfigError, UnsupportedError
from moet.kernels.cuda.experts import CudaExperts
from moet.kernels.cuda.prefill import PREFILL_TOKENS
from moet.kernels.cuda.shape import ExpertsShape
from moet.residency.cuda import CudaTierDevice
from moet.residency.hot_set import HotSetOptions
from moet.residency.tiers import TieredResidency
from moet.settings import Settings
from moet.vllm.build import counted
from moet.vllm.construction import ends_failed_steps
from moet.vllm.gate.gate import Gate
from moet.vllm.gpu import GPURuntime
from moet.vllm.gpu_tables import codes
from moet.vllm.opened import OpenedRows
from moet.vllm.phase import longest_decode
from moet.vllm.pools import all_rows
from moet.vllm.progress import LoadingProgress
from moet.vllm.tiers import most_layer_rows, owned_rows, size_tiers

_SWITCH_SECONDS = 50e-6

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


def build_gpu_runtime(
    vllm_config: Any,
    settings: Settings,
    opened: OpenedRows,
    heat_path: Path | None,
    verbose: bool,
) -> GPURuntime:
    """Fills the tiers; the dense weights are in GPU memory already.

    Args:
        verbose: whether this rank says in the log what it does.

    Raises ConfigError for sizes that cannot work, UnsupportedError for a vLLM configuration that
    could serve wrong results.
    """
    if not ends_failed_steps(vllm_config):
        raise UnsupportedError(
            "another worker or scheduler class than moet's, or pipeline parallelism: a step whose "
            "rows could not be read would be served as if nothing was wrong.",
            "Start without --worker-cls, --scheduler-cls and --pipeline-parallel-size.",
        )
    _check_dtype(vllm_config.model_config.dtype)
    geometry, source, precision = opened.geometry, opened.source, opened.precision
    layers = sorted(precision)
    device = torch.device("cuda", torch.cuda.current_device())
    recovery = opened.fp4 if settings.recovers or settings.adaptive else {}
    if settings.adaptive and len(set(recovery.values())) > 1:
        raise ConfigError(
            "an adaptive hot set needs one FP4 format in all layers.",
            "Leave the setting adaptive out.",
        )
    owned = owned_rows(precision, recovery)
    layouts = {p: source.layouts[p] for p in owned}
    operator = CudaExperts(
        ExpertsShape.of(layouts, geometry.num_experts, geometry.top_k, geometry.biases),
        device,
        # Biases of down are added in float32.
        torch.float32 if geometry.biases else torch.bfloat16,
        fp8_activations=settings.fp8_activations,
        prefill_tokens=min(PREFILL_TOKENS, vllm_config.scheduler_config.max_num_batched_tokens),
        batch_invariant=envs.VLLM_BATCH_INVARIANT,
    )
    free, total = torch.cuda.mem_get_info(device)
    layer_rows = most_layer_rows(vllm_config, geometry)
    plan = size_tiers(
        settings,
        owned,
        layouts,
        vllm_config,
        gpu_free=free,
        gpu_total=total,
        layer_rows=layer_rows,
    )
    largest = max(layout.row_bytes for layout in layouts.values())
    tier_device = CudaTierDevice(
        codes(precision),
        {p: layout.row_bytes for p, layout in layouts.items()},
        geometry.top_k,
        device,
        decode_tokens=vllm_config.scheduler_config.max_num_seqs * longest_decode(vllm_config),
        stage_row_bytes=largest,
        stage_rows=plan.staging // (2 * largest),
    )
    tiers = TieredResidency(
        source,
        layers,
        owned,
        plan.sizes,
        tier_device,
        settings.tier_options(layer_rows=layer_rows),
        heat_path=heat_path,
    )
    if verbose:
        lines = [
            f"rows       {opened.about}",
            f"precision  {settings.precision}: {counted(all_rows(precision, recovery))}",
            *plan.lines,
        ]
        logger.info("moet serves the routed experts:\n  %s", "\n  ".join(lines))
    # A step that waits for a row waits for the interpreter too: threads keep it for 5 ms otherwise.
    sys.setswitchinterval(_SWITCH_SECONDS)
    tiers.start()
    progress = LoadingProgress()
    # A hot set begins empty.
    loaded = set(owned) - set(recovery.values()) if settings.adaptive else owned
    tiers.preload(progress if verbose else None, loaded)
    if verbose:
        logger.info("moet: %d rows are in memory after %.1f s.", progress.rows, progress.seconds)
    target = [layer for layer in layers if layer not in geometry.mtp_layers]
    draft = [layer for layer in layers if layer in geometry.mtp_layers]
    # Each draft layer is a pass of its own.
    return GPURuntime(
        geometry,
        tiers,
        tier_device,
        source,
        precision,
        operator,
        frozenset([target[-1], *draft]),
        recovery=recovery,
        gate=None if settings.gate is None else Gate(settings.gate.tau, settings.gate.cap),
        hot_set=None
        if (hot := settings.adaptive) is None
        else HotSetOptions(hot.every, hot.margin),
    )


def _check_dtype(dtype: torch.dtype) -> None:
    """Raises ConfigError for activations that the kernels do not take."""
    if dtype is not torch.bfloat16:
        raise ConfigError(
            f"on a GPU the experts compute in bfloat16, not in {dtype}.",
            "Start with --dtype bfloat16.",
        )
