"""What the gate cannot be combined with, said before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from moet.errors import ConfigError, MoetError, UnsupportedError
from moet.settings import Settings

# A position's entry in these depends on no later one, and writing it twice is writing it once.
_WRITTEN_TWICE = (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
_NOT = (HiddenStateCacheSpec, RSWASpec, SinkFullAttentionSpec)  # subclasses of the above


def unsupported(vllm_config: Any, settings: Settings) -> Iterator[MoetError]:
    """Everything that stands in the way of these settings."""
    parallel = vllm_config.parallel_config
    if settings.recovers and not str(parallel.worker_cls).startswith("moet."):
        yield UnsupportedError(
            f"the gate, and prompts at FP4, need moet's worker, not {parallel.worker_cls}.",
            "Start without --worker-cls, and with VLLM_ENABLE_V1_MULTIPROCESSING=1; or without "
            "the settings gate and prefill_precision.",
        )
    yield from _adaptive(vllm_config, settings)
    if settings.gate is None:
        return
    if settings.precision == "fp4":
        yield ConfigError(
            "the gate has nothing to do with precision fp4: all experts run at FP4 anyway.",
            "Leave out the setting gate, or set precision to base or a map.",
        )
    for reason, remedy in _obstacles(vllm_config):
        yield UnsupportedError(f"the gate is not supported with {reason}.", remedy)


def _adaptive(vllm_config: Any, settings: Settings) -> Iterator[MoetError]:
    """What the adaptive hot set cannot be combined with."""
    if settings.adaptive is None:
        return
    if settings.recovers or settings.precision != "base":
        yield ConfigError(
            "an adaptive hot set decides by itself which experts run at FP4.",
            "Leave gate, prefill_precision and precision out, or adaptive.",
        )
    if settings.fp4_pool == "auto":
        yield ConfigError(
            "an adaptive hot set needs a size: fp4_pool is what it may grow to.",
            'Set fp4_pool, as in --fp4-pool "20%".',
        )
    if vllm_config.speculative_config is not None:
        yield UnsupportedError(
            "an adaptive hot set with speculative decoding is not supported: draft layers run at "
            "FP4.",
            "Start without --speculative-config, or without the setting adaptive.",
        )


def _obstacles(vllm_config: Any) -> Iterator[tuple[str, str]]:
    """What the second pass cannot do: (what it is, what to do)."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    otherwise = "Start without the setting gate."
    if parallel.pipeline_parallel_size > 1:
        yield (
            "pipeline parallelism: the first ranks have gone on when the last one is in doubt",
            "Start without --pipeline-parallel-size, or without the setting gate.",
        )
    if vllm_config.speculative_config is not None:
        yield (
            "speculative decoding",
            "Start without --speculative-config, or without the setting gate.",
        )
    if model.is_hybrid or model.is_attention_free:
        yield "linear attention, whose state cannot be computed twice", otherwise
    if model.is_encoder_decoder or model.is_mm_prefix_lm:
        yield "attention that is not causal", otherwise
    if parallel.decode_context_parallel_size > 1:
        yield "decode context parallelism", "Start without --decode-context-parallel-size."
    if parallel.use_ubatching:
        yield "dual batch overlap", "Start without --enable-dbo."
    if vllm_config.kv_transfer_config is not None:
        yield (
            "a KV connector: what it has sent would be replaced",
            "Start without --kv-transfer-config, or without the setting gate.",
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        yield "--kv-sharing-fast-prefill", "Start without it."


def check_cache(cache: KVCacheConfig) -> None:
    """Raises UnsupportedError for a cache whose entries cannot be written twice."""
    for group in cache.kv_cache_groups:
        for spec in _specs(group.kv_cache_spec):
            if not isinstance(spec, _WRITTEN_TWICE) or isinstance(spec, _NOT):
                raise UnsupportedError(
                    f"the gate is not supported for caches of {type(spec).__name__} "
                    f"({group.layer_names[0]}).",
                    "Start without the setting gate.",
                )


def _specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec]
