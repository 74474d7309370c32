"""Level 3's samples: each layer's tokens as the model quantized so far brings them there.

Packing goes layer by layer. Before a layer is quantized, the calibration's windows run once more
through vLLM, with the layers before it at 2 bits, from the files of the unfinished pack, and no
experts from it on. So all that a pack costs is one prefill of the windows for every layer, half of
it without experts; memory holds what serving does, and one layer's samples are on disk at a time.
One engine serves all passes; a run that resumes starts with the layer that it stopped at.

The alternative, a loop over layers outside vLLM, would need every family's attention once more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from vllm import LLM

from moet.calibrate import Calibration, CalibrationLayout
from moet.closing import Closing
from moet.quantize import LayerSamples, SampleSource
from moet.vllm.collect import run_window


class SequentialSamples(SampleSource, Closing):
    """The samples of a calibration, with those of the quantized model beside them.

    A context manager, since it runs an engine from the second layer on.

    Args:
        partial: where the pack is being written; its journal tells which layers are finished.
        engine: makes a calibration engine (`collect`), whose pack is any finished pack of the
            model with the same slices; entered when the second layer is asked for.
        progress: called with (layer, windows done) as a layer's pass goes on.
    """

    def __init__(
        self,
        calibration: Calibration,
        partial: Path,
        engine: Callable[[], AbstractContextManager[LLM]],
        progress: Callable[[int, int], None],
    ) -> None:
        self.digest = calibration.digest
        self._calibration, self._partial = calibration, partial
        self._make_engine, self._progress = engine, progress
        self._windows = calibration.windows()
        self._scratch = partial.with_name(partial.name + ".samples")
        self._stack = ExitStack()
        self._llm: LLM | None = None

    def close(self) -> None:
        self._stack.close()
        self._scratch.unlink(missing_ok=True)

    def layer(self, layer: int) -> LayerSamples | None:
        samples = self._calibration.layer(layer)
        metadata = self._calibration.metadata
        if samples is None or layer == metadata.layers[0]:
            return samples  # before the first layer nothing is quantized
        layout = CalibrationLayout(metadata).of_layer(layer)
        # A new file: the one of the layer before may still be mapped.
        self._scratch.unlink(missing_ok=True)
        with self._scratch.open("wb") as file:
            file.truncate(layout.file_bytes)
        llm = self._engine()
        llm.collective_rpc(
            "moet_record_quantized",
            args=(layer, str(self._scratch), layout.metadata.model_dump_json(), str(self._partial)),
        )
        for index in range(metadata.windows):
            run_window(llm, self._windows, index, (layer,), sync=False)
            self._progress(layer, index + 1)
        quantized = Calibration(self._scratch, layout).samples(layer, None).x
        return replace(samples, quantized=quantized)

    def _engine(self) -> LLM:
        if self._llm is None:
            self._llm = self._stack.enter_context(self._make_engine())
        return self._llm
