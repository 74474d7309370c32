"""The quantization config `moet`: the checkpoint's own config, with another method for the experts.

vLLM and its models ask the quantization config many things besides a layer's method (is it a
`CompressedTensorsConfig`? which modules are excluded? how is the KV cache stored?), so the
checkpoint's config is subclassed at run time rather than wrapped: every such question still gets
the checkpoint's own answer, and only `RoutedExperts` layers get ours.

vLLM pickles its configuration into the engine's and the workers' processes. The run-time classes
are therefore attributes of this module, made when first asked for (`__getattr__`).

Nothing here or in `loader.py` imports numba, which most of moet needs, at module level: vLLM 0.32's
CPU worker, right before it makes its device, walks through all imported modules
(`triton_utils/dispatcher.py`) and fails on llvmlite's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from moet.errors import UnsupportedError
from moet.vllm import METHOD
from moet.vllm.construction import config_under_construction, name_classes

_PREFIX = "Moet__"
_UNQUANTIZED = "unquantized"
_INNER_KEY = "moet_inner_method"

# The 2-bit rows are decoded to float32 or bfloat16; float16 cannot hold the down projection's
# sums of some models.
_ACTIVATION_DTYPES = [torch.bfloat16, torch.float32]


class UnquantizedConfig(QuantizationConfig):  # type: ignore[misc]
    """What to subclass when the checkpoint is not quantized: every dense layer stays as it is."""

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(_ACTIVATION_DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> UnquantizedConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


class MoetMixin:
    """First among the bases of every run-time class."""

    _moet_checked = False

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return list(_ACTIVATION_DTYPES)

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """vLLM's first hook, in process 0: what is wrong with the configuration is said here.

        Not where the engine runs in process 0 as well (see numba, above): then it is said when the
        first layer is made.
        """
        super().maybe_update_config(model_name, hf_config, revision)  # type: ignore[misc]
        if hf_config is None:
            return
        vllm_config = config_under_construction()
        if vllm_config is not None:
            name_classes(vllm_config)
        if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            return
        from moet.vllm.checks import check_engine, check_model

        check_model(hf_config)
        if vllm_config is not None:
            check_engine(vllm_config)
            self._moet_checked = True

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not self._moet_checked:
            from moet.vllm.checks import check_engine

            check_engine(get_current_vllm_config())
            self._moet_checked = True
        # The checkpoint's MoE method is never made: its constructor looks for a fast kernel of
        # its own and raises on a machine that has none.
        if isinstance(layer, RoutedExperts):
            from moet.vllm.method import MoetMoEMethod

            return MoetMoEMethod(layer, prefix)
        if isinstance(layer, ParallelLMHead) and prefix.endswith(".head"):
            # vLLM 0.32's draft models name their head so; checkpoints, and what they say of it:
            prefix = f"{prefix.removesuffix('.head')}.shared_head.head"
        method: QuantizeMethodBase | None = super().get_quant_method(  # type: ignore[misc]
            layer, prefix
        )
        if isinstance(layer, LinearBase) and not isinstance(method, UnquantizedLinearMethod):
            self._check_dtype(layer.params_dtype, prefix)
        return method

    def _check_dtype(self, dtype: torch.dtype, prefix: str) -> None:
        """Refuses a quantized dense layer in a dtype that only the routed experts can take."""
        supported = super().get_supported_act_dtypes()  # type: ignore[misc]
        if dtype not in supported:
            raise UnsupportedError(
                f"{prefix} is quantized in the checkpoint, and vLLM computes it in "
                f"{', '.join(map(str, supported))} only, not in {dtype}.",
                "Start with --dtype bfloat16.",
            )


def config_class(inner: str) -> type[QuantizationConfig]:
    """The run-time class for a checkpoint whose own method is called `inner` in vLLM.

    Every process that serves with moet passes here, and no other does: process 0 when it reads
    the checkpoint's config, the others when they unpickle it. So this is where the loader is
    registered.
    """
    from moet.vllm.loader import register_loader

    name = _PREFIX + inner.replace("-", "_dash_")
    made = globals().get(name)
    if made is None:
        base = UnquantizedConfig if inner == _UNQUANTIZED else get_quantization_config(inner)
        made = type(name, (MoetMixin, base), {"__module__": __name__, "__qualname__": name})
        globals()[name] = made
        register_loader()
    return made


def __getattr__(name: str) -> type[QuantizationConfig]:
    if name.startswith(_PREFIX):
        return config_class(name[len(_PREFIX) :].replace("_dash_", "-"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class MoetConfig(UnquantizedConfig):
    """What vLLM finds under the name "moet"; making one makes the right run-time class instead."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return config_class(_UNQUANTIZED)(*args, **kwargs)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        config = dict(config)
        inner = config.pop(_INNER_KEY, None) or _inner_method(config, None)
        return config_class(inner).from_config(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Takes a quantized checkpoint only if the user asked for moet.

        vLLM asks this before it reads the config, and only here shows the model's config too, which
        some methods need to recognise their checkpoint; so what they answer is kept for
        `from_config`.
        """
        if user_quant != METHOD:
            return None
        hf_quant_cfg[_INNER_KEY] = _inner_method(hf_quant_cfg, hf_config)
        return METHOD


def _inner_method(config: Mapping[str, Any], hf_config: Any) -> str:
    """vLLM's name of the method that a checkpoint's `quantization_config` stands for.

    The `quant_method` in the file is not always that name ("modelopt" may mean "modelopt_fp4"), so
    vLLM's methods are asked, as vLLM would without us.
    """
    stated = str(config.get("quant_method", ""))
    for name in QUANTIZATION_METHODS:
        if name == METHOD:
            continue
        answer = get_quantization_config(name).override_quantization_method(
            dict(config), None, hf_config=hf_config
        )
        if answer is not None:
            return str(answer)
    if stated not in QUANTIZATION_METHODS or stated == METHOD:
        raise UnsupportedError(
            f"the checkpoint's quantization_config.quant_method {stated!r} is not one that vLLM "
            "knows.",
            "Serve a checkpoint in its publisher's format.",
        )
    return stated
