"""Entry point `vllm.general_plugins: moet`, called once in each of vLLM's processes."""

from __future__ import annotations

from moet.vllm import METHOD


def register() -> None:
    """Makes `--quantization moet` known. May be called more than once.

    Nothing else of vLLM changes: the loader is registered only in processes that serve with moet
    (`loader.py`).
    """
    from vllm.model_executor.layers.quantization import register_quantization_config

    from moet.vllm.config import MoetConfig

    register_quantization_config(METHOD)(MoetConfig)
