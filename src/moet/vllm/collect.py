"""Running a model over calibration windows in vLLM's offline engine, one window a request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt

from moet.calibrate import CalibrationWriter, Windows
from moet.errors import CalibrationError
from moet.vllm import METHOD
from moet.vllm import __file__ as _LIGHT_MODULE

EXTENSION = "moet.vllm.calibration.CalibrationExtension"


@contextmanager
def calibration_engine(
    model: Path, settings: Mapping[str, Any], window: int, options: Mapping[str, Any]
) -> Iterator[LLM]:
    """An engine that runs windows of `window` tokens, with moet's `settings`.

    options: vLLM's engine arguments, over those that calibration needs: eager, because tokens are
    noted down on the way; without prefix caching, because every token must pass.
    """
    needed = {
        "quantization": METHOD,
        "additional_config": {"moet": dict(settings)},
        "worker_extension_cls": EXTENSION,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        "max_model_len": window + 1,
        "max_num_seqs": 1,
    }
    clash = sorted(set(needed) & set(options))
    if clash:
        raise CalibrationError(
            f"the engine option {clash[0]!r} is calibration's own.", "Leave it out."
        )
    with _main_not_imported_again():
        llm = LLM(model=str(model), seed=0, **needed, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def _main_not_imported_again() -> Iterator[None]:
    """Keeps spawned processes from importing this process's main module first.

    `moet`'s would import numba, with which vLLM 0.32's CPU worker does not start (`config.py`).
    """
    main = sys.modules["__main__"]
    spec, file = main.__spec__, main.__file__
    try:
        main.__spec__, main.__file__ = None, _LIGHT_MODULE
        yield
    finally:
        main.__spec__, main.__file__ = spec, file


def run_window(llm: LLM, windows: Windows, index: int, layers: tuple[int, ...], sync: bool) -> None:
    """One window through the model.

    Raises CalibrationError unless each layer saw all of it, and rows for all of it were there.
    """
    llm.collective_rpc("moet_window", args=(index,))
    (output,) = llm.generate(
        TokensPrompt(prompt_token_ids=windows.ids[index].tolist()),
        SamplingParams(temperature=0, max_tokens=1, detokenize=False),
        use_tqdm=False,
    )
    if output.outputs[0].finish_reason == "error":  # a failed step, computed without some rows
        raise CalibrationError(
            f"window {index}: rows of the experts could not be read; the log says which and why.",
            "Run `moet verify` on the pack; the same command again resumes.",
        )
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
