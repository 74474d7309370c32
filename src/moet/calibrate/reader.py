"""Reading a calibration: everything is checked before it is used, and read a layer at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from moet.calibrate.layout import DIGESTED, METADATA_KEY, CalibrationLayout, Metadata, Place
from moet.calibrate.tokens import Windows
from moet.checkpoints import Checkpoint
from moet.errors import CalibrationError
from moet.quantize import LayerSamples, SampleSource

_HEADER_LIMIT = 64 * 2**20
_NUMPY = {"U8": "u1", "BF16": "<i2", "I32": "<i4", "F32": "<f4", "I64": "<i8", "F64": "<f8"}
REMAKE = "Copy it again, or make it anew with `moet calibrate`."


class Calibration(SampleSource):
    """An opened calibration file.

    Attributes:
        path: the file. metadata: what it is of. digest: BLAKE3 of the header and of every layer's
            digest, and so of all samples.
    """

    def __init__(self, path: Path, layout: CalibrationLayout) -> None:
        self.path, self.metadata, self._layout = path, layout.metadata, layout
        hasher = blake3(layout.header)
        for layer in layout.metadata.layers:
            hasher.update(self.array(layer, "blake3").tobytes())
        self.digest = hasher.hexdigest()

    @classmethod
    def open(cls, path: str | Path) -> Calibration:
        """Raises CalibrationError for a file that is no calibration, or not a whole one."""
        path = Path(path)
        layout = CalibrationLayout(_metadata(path))
        with path.open("rb") as file:
            whole = file.read(len(layout.header)) == layout.header
        if not whole or path.stat().st_size != layout.file_bytes:
            raise CalibrationError(f"{path}: is truncated or was changed.", REMAKE)
        return cls(path, layout)

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raises CalibrationError unless the samples are of `checkpoint`."""
        ours, geometry = self.metadata, checkpoint.geometry
        same_shape = (ours.hidden, ours.experts, ours.top_k) == (
            geometry.hidden,
            geometry.num_experts,
            geometry.top_k,
        )
        if ours.model.source != checkpoint.identity or not same_shape:
            raise CalibrationError(
                f"{self.path}: is a calibration of {ours.model.name!r} "
                f"({ours.model.source[:12]}), not of {checkpoint.name!r} "
                f"({checkpoint.identity[:12]}).",
                "Make one for this checkpoint with `moet calibrate`.",
            )

    def windows(self) -> Windows:
        """The tokens that were run; raises CalibrationError when they are damaged."""
        windows = Windows(np.array(self._map(self._layout.tokens)))
        if windows.digest != self.metadata.tokens:
            raise CalibrationError(f"{self.path}: its tokens are damaged.", REMAKE)
        return windows

    def array(self, layer: int, name: str) -> NDArray[Any]:
        """One tensor of a layer, mapped; BF16 as int16."""
        return self._map(self._layout.place(layer, name))

    def layer(self, layer: int) -> LayerSamples | None:
        """The samples of a layer, mapped, once their digest is checked.

        Raises CalibrationError naming the layer when it fails.
        """
        if layer not in self.metadata.layers:
            return None
        if self.layer_digest(layer) != self.array(layer, "blake3").tobytes():
            raise CalibrationError(
                f"{self.path}: the samples of layer {layer} are damaged (their checksum fails).",
                REMAKE,
            )
        return self.samples(layer, self._tensor(layer, "second_moment"))

    def samples(self, layer: int, second_moment: Tensor | None) -> LayerSamples:
        """The same as they are in the file, unchecked."""
        return LayerSamples(
            self._tensor(layer, "inputs").view(torch.bfloat16),
            self._tensor(layer, "experts"),
            self._tensor(layer, "weights"),
            second_moment,
        )

    def layer_digest(self, layer: int) -> bytes:
        """BLAKE3 of a layer's samples as they are in the file."""
        hasher = blake3()
        for name in DIGESTED:
            hasher.update(self.array(layer, name).reshape(-1).view(np.uint8).data)
        return hasher.digest()

    def _map(self, place: Place) -> NDArray[Any]:
        return np.memmap(self.path, _NUMPY[place.dtype], "c", place.offset, place.shape)

    def _tensor(self, layer: int, name: str) -> Tensor:
        return torch.from_numpy(self.array(layer, name))


def _metadata(path: Path) -> Metadata:
    """The metadata in a file's header, validated."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            raw = file.read(size) if 0 < size <= _HEADER_LIMIT else b""
        if len(raw) != size or not raw:
            raise ValueError("its header is cut off")
        return Metadata.model_validate_json(json.loads(raw)["__metadata__"][METADATA_KEY])
    except OSError as error:
        raise CalibrationError(
            f"{path}: cannot be read ({error.strerror}).", "Make it with `moet calibrate`."
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise CalibrationError(f"{path}: is not valid ({where}: {first['msg']}).", REMAKE) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CalibrationError(f"{path}: is not a calibration file ({error}).", REMAKE) from None
