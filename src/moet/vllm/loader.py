"""Loading the dense layers of a checkpoint, and never reading its routed experts.

vLLM picks a loader by `--load-format` alone, before it makes any layer, so `--quantization moet`
by itself cannot choose one. Three ways were weighed:

* wrap `EngineArgs.create_engine_config`, as vLLM's own bitsandbytes and GGUF plugins do: that
  patches vLLM, and a flag the user gave would silently change;
* let every expert tensor through and drop it on arrival: needs nothing, but reads the experts
  wherever the files are not memory-mapped (network file systems, `--safetensors-load-strategy`);
* replace the loader of the default load formats through `register_model_loader`, by a subclass that
  does nothing of its own unless the model it loads is served with moet. That is what is done, and
  only in processes that hold a moet quantization config (`config.config_class`), so that a vLLM
  which merely has moet installed never sees it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from moet.errors import CheckpointError
from moet.vllm import METHOD

LOAD_FORMATS = ("auto", "hf", "safetensors")

logger = init_logger(f"vllm.{__name__}")  # vLLM shows its own loggers only


class DenseLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's default loader; with moet, expert tensors are passed over by name, unread."""

    _moet = False
    counter_before_loading_weights: float

    def get_all_weights(
        self, model_config: Any, model: nn.Module
    ) -> Generator[tuple[str, Tensor], None, None]:
        self._moet = model_config.quantization == METHOD
        yield from super().get_all_weights(model_config, model)

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Tensor]]:
        if not self._moet:
            stock: Iterator[tuple[str, Tensor]] = super()._get_weights_iterator(source)
            return stock
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        folder, files, use_safetensors, _ = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if not use_safetensors:
            raise CheckpointError(
                f"{folder} holds no safetensors files.", "Serve a checkpoint in safetensors format."
            )
        return dense_tensors(Path(folder), sorted(files), source.prefix)


def dense_tensors(
    folder: Path, files: list[str], prefix: str = ""
) -> Generator[tuple[str, Tensor], None, None]:
    """Every tensor of `files` but those of routed experts: (prefix + name, tensor)."""
    from moet.checkpoints import Checkpoint  # not before the worker is up: see config.py

    with Checkpoint.open(folder) as checkpoint:
        is_expert_tensor = checkpoint.is_expert_tensor
    read = passed = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                if is_expert_tensor(name):
                    passed += 1
                    continue
                read += 1
                yield prefix + name, tensors.get_tensor(name)
    logger.info("moet: read %d dense tensors, left %d expert tensors unread.", read, passed)


def register_loader() -> None:
    """Puts `DenseLoader` in the place of vLLM's default loader, in this process."""
    with _without_overwrite_notes():
        for load_format in LOAD_FORMATS:
            register_model_loader(load_format)(DenseLoader)


@contextmanager
def _without_overwrite_notes() -> Iterator[None]:
    """vLLM warns that a load format is overwritten: it is, on purpose, so do not alarm the user."""

    def quiet(record: logging.LogRecord) -> bool:
        return False

    target = logging.getLogger("vllm.model_executor.model_loader")
    target.addFilter(quiet)
    try:
        yield
    finally:
        target.removeFilter(quiet)
