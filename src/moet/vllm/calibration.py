"""Calibration inside vLLM's workers: what reaches the routed experts is written down as it passes.

`--worker-extension-cls moet.vllm.calibration.CalibrationExtension`. The engine is an ordinary one
that serves with moet; the methods here put a recording runtime in the place of every layer's.
Nothing is imported at module level that a worker may not yet have (see `config.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moet.vllm.worker import MoetWorkerExtension

if TYPE_CHECKING:
    from moet.vllm.recording import Recorder


class CalibrationExtension(MoetWorkerExtension):
    """Mixed into vLLM's worker class; every rank of the engine gets the same calls."""

    _recorder: Recorder | None = None

    def moet_layers(self) -> list[int]:
        """The layers whose experts this rank computes."""
        from moet.vllm.method import moet_methods

        return [method.layer for method in moet_methods(self.vllm_config)]

    def moet_record(self, path: str, metadata: str) -> None:
        """From now on records into an unfinished calibration file.

        metadata: `calibrate.Metadata` as JSON.
        """
        from moet.vllm.recording import Recorder

        self._recorder = Recorder.of_model(self, path, metadata)

    def moet_record_quantized(self, layer: int, path: str, metadata: str, partial: str) -> None:
        """From now on records one layer, with the layers before it as in an unfinished pack.

        The experts of that layer and of those after it are left out: nothing that is recorded
        depends on them.
        """
        from moet.vllm.recording import Recorder

        if self._recorder is not None:
            self._recorder.sink.close()
        self._recorder = Recorder.of_quantized(self, layer, path, metadata, partial)

    def moet_window(self, window: int) -> None:
        """What runs next is this window."""
        assert self._recorder is not None, "moet_record comes first"
        self._recorder.sink.begin(window)

    def moet_window_seen(self, sync: bool) -> dict[str, Any]:
        """What the window has brought: tokens by layer, and layers with inputs that were not
        finite. sync: also see to it that all so far is on disk."""
        assert self._recorder is not None, "moet_record comes first"
        return self._recorder.seen(sync)
