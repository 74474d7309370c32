"""The quantizer of a level, with the calibration and, for level 3, the engine that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moet.calibrate import Calibration
from moet.checkpoints import Checkpoint
from moet.cli.device import Device
from moet.cli.engine import log_to_stderr
from moet.cli.ui import err
from moet.errors import ConfigError, UnsupportedError
from moet.kernels import SwiGLU
from moet.kernels.reference import gated
from moet.pack import Pack
from moet.quantize import QUANTIZERS, BaseQuantizer, CalibratedQuantizer, SampleSource
from moet.settings import default_pack_path

LEVELS = {quantizer.level: quantizer for quantizer in map(QUANTIZERS.__getitem__, QUANTIZERS)}


@contextmanager
def level_quantizer(
    level: int,
    checkpoint: Checkpoint,
    out: Path,
    *,
    calibration: Path | None = None,
    settings: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    device: Device = Device.AUTO,
) -> Iterator[BaseQuantizer]:
    """The quantizer that makes the pack `out` at `level`; says at the end what it fell back to.

    settings, engine: moet's settings and vLLM's engine arguments for level 3's passes. device:
    where levels 1 to 3 compute.
    """
    quantizer = LEVELS[level]
    if not issubclass(quantizer, CalibratedQuantizer):
        if calibration is not None:
            raise ConfigError("level 0 uses no calibration.", "Choose --level 1, 2 or 3.")
        yield quantizer()
        return
    if calibration is None:
        raise ConfigError(
            f"level {level} needs a calibration.",
            "Make one with `moet calibrate`, and name it with --calibration.",
        )
    opened = open_calibration(calibration, checkpoint)
    with ExitStack() as stack:
        stack.enter_context(_one_thread_an_operation())
        samples: SampleSource = opened
        if level == 3:
            log_to_stderr()
            from moet.vllm.collect import calibration_engine
            from moet.vllm.sequential import SequentialSamples

            make_engine = partial(
                calibration_engine,
                checkpoint.path,
                _with_pack(checkpoint, out, settings or {}),
                opened.metadata.window,
                engine or {},
            )
            samples = stack.enter_context(
                SequentialSamples(
                    opened,
                    Path(f"{out.absolute()}.partial"),
                    make_engine,
                    _pass_progress(opened.metadata.windows),
                )
            )
        made = quantizer(
            samples,
            activation=partial(gated, activation=swiglu_of(checkpoint)),
            device=device.resolve(),
        )
        yield made
    _say_bases(made)


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """Experts run in parallel already; threads of torch's own would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_calibration(path: Path, checkpoint: Checkpoint) -> Calibration:
    """The calibration of `checkpoint` in `path`."""
    refuse_biases(checkpoint)
    opened = Calibration.open(path)
    opened.check_model(checkpoint)
    return opened


def refuse_biases(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedError for a model whose experts' biases a calibration would not know."""
    if checkpoint.geometry.biases:
        raise UnsupportedError(
            f"{checkpoint.name}: calibration does not know experts with biases.",
            "Pack it at level 0.",
        )


def swiglu_of(checkpoint: Checkpoint) -> SwiGLU:
    """The experts' activation."""
    geometry = checkpoint.geometry
    return SwiGLU(geometry.swiglu_limit, geometry.swiglu_alpha, geometry.swiglu_beta)


def _with_pack(checkpoint: Checkpoint, out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the pack that the engine starts from, which must be there."""
    default = default_pack_path(checkpoint.name, checkpoint.identity)
    pack = Path(settings.get("pack", default)).absolute()
    if pack == out.absolute():
        raise ConfigError(
            f"{pack}: level 3 starts from a finished pack and writes another.",
            "Choose another --output, or another pack with --set pack=DIRECTORY.",
        )
    Pack.open(pack).check_model(checkpoint)
    return {**settings, "pack": str(pack), "precision": "base"}


def _say_bases(quantizer: CalibratedQuantizer) -> None:
    counts = quantizer.bases
    total = sum(counts.values())
    if counts["layer"] or counts["level 0"]:
        err.print(
            f"of {total} matrices {counts['layer']} saw no token and were made from their layer's, "
            f"{counts['level 0']} at level 0 (layers without samples, such as draft layers)"
        )


def _pass_progress(windows: int) -> Any:
    every = max(1, windows // 4)

    def report(layer: int, done: int) -> None:
        if done % every == 0 or done == windows:
            err.print(f"layer {layer} on the quantized model: {done} of {windows} windows")

    return report
