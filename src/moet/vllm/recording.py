"""A worker's recorder: the runtime that notes down what passes, and the residual stream's power."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moet.calibrate import CalibrationLayout, Metadata, SampleSink
from moet.errors import UnsupportedError
from moet.formats.layout import Precision
from moet.kernels import SwiGLU
from moet.residency.tiers.options import TierSizes
from moet.vllm.method import MoetMoEMethod, find_runtime, moet_methods
from moet.vllm.phase import Fp4Tokens
from moet.vllm.quantized import quantized_runtime
from moet.vllm.rank import RankExperts
from moet.vllm.runtime import Runtime

Note = Callable[[int, Tensor, Tensor, Tensor], None]
"""layer, x [T, hidden], ids [T, k], weights [T, k]."""


class RecordingRuntime(RankExperts):
    """Another runtime, seen through: layers' inputs are noted down on the way.

    With `only`, just that layer's; layers before it are as in the inner runtime, and from it on no
    experts are computed. Everything else is passed on, but `close`: what must be closed stays the
    inner runtime's.
    """

    def __init__(self, inner: RankExperts, note: Note, only: int | None = None) -> None:
        for name in RankExperts.__annotations__:
            setattr(self, name, getattr(inner, name))
        self.inner = inner
        self._note, self._only = note, only

    def check_layer(self, layer: int, experts: int, hidden: int, intermediate: int) -> None:
        self.inner.check_layer(layer, experts, hidden, intermediate)

    def experts(
        self,
        layer: int,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        attn_metadata: Any,
        activation: SwiGLU,
        fp4: Fp4Tokens | None = None,
    ) -> Tensor:
        if self._only in (None, layer):
            self._note(layer, x, topk_ids, topk_weights)
        if self._only is not None and layer >= self._only:
            return torch.zeros_like(x)
        return self.inner.experts(layer, x, topk_ids, topk_weights, attn_metadata, activation, fp4)

    def seen_through(self) -> RankExperts:
        return self.inner

    def foresee(self, tables: Mapping[int, Tensor]) -> None:
        self.inner.foresee(tables)

    def prefetch(self, token_ids: Tensor) -> None:
        self.inner.prefetch(token_ids)

    def stats(self) -> dict[str, Any]:
        return self.inner.stats()

    def all_at_fp4(self, on: bool) -> bool:
        return self.inner.all_at_fp4(on)

    def resize(self, precision: Precision, sizes: TierSizes) -> None:
        self.inner.resize(precision, sizes)

    def close(self) -> None:
        """Nothing: see above."""


class Recorder:
    """Records the samples of this rank's layers; tensor-parallel ranks see the same, so one does.

    Attributes:
        sink: where they go. methods: of the layers that record.
    """

    def __init__(self, sink: SampleSink, methods: list[MoetMoEMethod], writes: bool) -> None:
        self.sink, self.methods, self._writes = sink, methods, writes
        self._power: dict[int, tuple[float, int]] = {}

    @classmethod
    def of_model(cls, worker: Any, path: str, metadata: str) -> Recorder:
        """Makes every layer of the worker's target model record from now on."""
        layout = CalibrationLayout(Metadata.model_validate_json(metadata))
        wanted = set(layout.metadata.layers)
        methods = [m for m in moet_methods(worker.vllm_config) if m.layer in wanted]
        inner = find_runtime(worker.vllm_config)
        writes = inner is not None and methods[0].moe.tp_rank == 0
        recorder = cls(SampleSink(Path(path), layout), methods, writes)
        if inner is None:
            return recorder  # a pipeline's rank without routed experts
        runtime = RecordingRuntime(inner.seen_through(), recorder._note)
        for method in methods:
            method.runtime = runtime
        if writes:
            recorder._watch_stream(worker.model_runner.model)
        return recorder

    @classmethod
    def of_quantized(
        cls, worker: Any, layer: int, path: str, metadata: str, partial: str
    ) -> Recorder:
        """Makes one layer record, with the layers before it at 2 bits from an unfinished pack."""
        layout = CalibrationLayout(Metadata.model_validate_json(metadata))
        methods = moet_methods(worker.vllm_config)
        old = find_runtime(worker.vllm_config)
        if old is None:
            return cls(SampleSink(Path(path), layout), methods, False)
        old = old.seen_through()
        before = [m.layer for m in methods if m.layer < layer]
        moe = methods[0].moe
        inner = old
        if before:
            if not isinstance(old, Runtime):
                raise UnsupportedError(
                    "level 3 calibrates on the model's own quantized layers on the CPU only.",
                    "Use level 2, or vLLM's CPU build for `moet pack --level 3`.",
                )
            inner = quantized_runtime(
                worker.vllm_config, Path(partial), before, old, moe.tp_rank, moe.tp_size
            )
        recorder = cls(SampleSink(Path(path), layout), methods, moe.tp_rank == 0)
        runtime = RecordingRuntime(inner, recorder._note, only=layer)
        for method in methods:
            method.runtime = runtime
        return recorder

    def seen(self, sync: bool) -> dict[str, Any]:
        for layer, (total, tokens) in self._power.items():
            self.sink.power(layer, total / tokens)
        self._power = {}
        if sync:
            self.sink.sync()
        return {"seen": dict(self.sink.seen), "broken": list(self.sink.broken)}

    def _note(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        if self._writes:
            self.sink.add(layer, x, ids, weights)

    def _watch_stream(self, model: nn.Module) -> None:
        """Notes the power of the residual stream at each recorded layer's entry.

        vLLM's decoder layers take the stream as `hidden_states` and `residual`, whose sum it is
        (DeepSeek, Qwen, GLM and most others). A layer that does not leaves the power unknown.
        """
        for method in self.methods:
            name = f"layers.{method.layer}"
            for path, module in model.named_modules():
                if path == name or path.endswith(f".{name}"):
                    module.register_forward_pre_hook(
                        self._stream_hook(method.layer), with_kwargs=True
                    )

    def _stream_hook(self, layer: int) -> Callable[..., None]:
        hidden = self.sink.hidden

        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            parts = [
                value
                for value in (*arguments, *named.values())
                if isinstance(value, Tensor)
                and value.is_floating_point()
                and value.shape[-1] == hidden
            ]
            if not parts:
                return
            # A stream of several lanes (hyper-connections) counts with all of them.
            stream = parts[0].double()
            for part in parts[1:]:
                if part.shape == stream.shape:
                    stream = stream + part.double()
            total, tokens = self._power.get(layer, (0.0, 0))
            power = float(stream.square().sum())
            if math.isfinite(power):
                self._power[layer] = total + power, tokens + stream.shape[0]

        return hook
