"""Running a model over calibration windows in vLLM's offline engine, one window a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vllm import LLM

from moet.calibrate import CalibrationWriter, Windows
from moet.errors import CalibrationError
from moet.vllm.offline import offline_engine, prefill

EXTENSION = "moet.vllm.calibration.CalibrationExtension"


def calibration_engine(
    model: Path, settings: Mapping[str, Any], window: int, options: Mapping[str, Any]
) -> AbstractContextManager[LLM]:
    """An `offline_engine` whose workers write down what reaches the experts."""
    return offline_engine(model, settings, window, options, worker_extension_cls=EXTENSION)


def run_window(llm: LLM, windows: Windows, index: int, layers: tuple[int, ...], sync: bool) -> None:
    """One window through the model.

    Raises CalibrationError unless each layer saw all of it, and what `prefill` raises.
    """
    llm.collective_rpc("moet_window", args=(index,))
    prefill(llm, windows.ids[index], index)
    ranks = llm.collective_rpc("moet_window_seen", args=(sync,))
    length = windows.ids.shape[1]
    for layer in layers:
        if any(layer in rank["broken"] for rank in ranks):
            raise CalibrationError(
                f"window {index}: the inputs of layer {layer} are not all finite.",
                "Calibrate in a dtype that holds the model's activations (bfloat16 or float32).",
            )
        seen = [rank["seen"].get(layer, 0) for rank in ranks]
        if max(seen) != length:
            raise CalibrationError(
                f"window {index}: layer {layer} saw {max(seen)} of {length} tokens.",
                "The engine options must leave vLLM's prefill whole: no caching, no padding.",
            )


def collect(
    llm: LLM,
    writer: CalibrationWriter,
    windows: Windows,
    progress: Callable[[int], None],
) -> None:
    """Runs the windows that are not on disk yet; progress: windows done, after each."""
    metadata = writer.layout.metadata
    computed = {layer for rank in llm.collective_rpc("moet_layers") for layer in rank}
    missing = sorted(set(metadata.layers) - computed)
    if missing:
        raise CalibrationError(f"vLLM did not make layer {missing[0]}, which the model has.")
    arguments = (str(writer.partial.resolve()), metadata.model_dump_json())
    llm.collective_rpc("moet_record", args=arguments)
    for index in range(writer.done, metadata.windows):
        run_window(llm, windows, index, metadata.layers, sync=True)
        writer.record(index + 1)
        progress(index + 1)
