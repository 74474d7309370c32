"""A pack's rows as the lowest tier of residency: one rank's slices, verified as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from moet.checkpoints.reader import Checkpoint
from moet.errors import ConfigError, PackError
from moet.formats.layout import Precision, RowLayout
from moet.pack.checkpoint_rows import CheckpointRows
from moet.pack.files import U8, StorageFile
from moet.pack.reader import Pack, PackLayer
from moet.pack.source import RowKey, RowSource

REPAIR = "Copy the pack again, or run `moet verify` to see all that is damaged."


class PackRowSource(RowSource):
    """Rows from an opened pack and, for FP4 that stays there, from its checkpoint's files.

    Args:
        pack: the pack. checkpoint: the model it was made from, which is checked; without it there
            are no FP4 rows but those in the pack.
        tp_rank, tp_size: which run of slices to read.
        direct_io: read with O_DIRECT; rows go straight to their place when `out` and the rank's
            slices are aligned to 4096 bytes, else through a buffer of the thread.
        verify: check the BLAKE3 of what is read.

    Every file is opened once, here; `close`, or leaving the context, closes them.
    Raises PackError (another model, a file that is gone), UnsupportedError (slices do not divide
    among the ranks), ConfigError (the file system has no O_DIRECT).
    """

    def __init__(
        self,
        pack: Pack,
        checkpoint: Checkpoint | None = None,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        direct_io: bool = False,
        verify: bool = True,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ConfigError(f"tensor-parallel rank {tp_rank} of {tp_size} is impossible.")
        if checkpoint is not None:
            pack.check_model(checkpoint)
        geometry = pack.manifest.geometry
        self.layers = geometry.moe_layers
        self.num_experts = geometry.num_experts
        self.identity = pack.digest
        self._pack = pack
        self._rank, self._size, self._verify = tp_rank, tp_size, verify
        self.layouts: Mapping[Precision, RowLayout] = {
            layout.precision: layout.local(tp_size)
            for layer in pack.layers.values()
            for layout in (layer.layout.base, layer.layout.fp4)
            if layout is layer.layout.base or layer.layout.fp4_in_pack or checkpoint is not None
        }
        with ExitStack() as stack:
            self._files = {
                index: stack.enter_context(StorageFile(layer.path, direct=direct_io))
                for index, layer in pack.layers.items()
            }
            self._checkpoint = None
            if checkpoint is not None and not all(
                layer.layout.fp4_in_pack for layer in pack.layers.values()
            ):
                self._checkpoint = stack.enter_context(
                    CheckpointRows(pack, checkpoint, direct=direct_io, verify=verify)
                )
            self._open_files = stack.pop_all()

    def close(self) -> None:
        """Closes the files; reading afterwards is an error."""
        self._open_files.close()

    def read(self, key: RowKey, out: NDArray[np.uint8]) -> int:
        layer = self._layer(key)
        if key.precision is not Precision.BASE and not layer.layout.fp4_in_pack:
            assert self._checkpoint is not None  # _layer has seen to it
            return self._checkpoint.read(key, self.layouts[key.precision], self._rank, out)
        return self._read_own(layer, key, out)

    def factors(self, layer: int, precision: Precision) -> NDArray[np.float32]:
        found = self._layer(RowKey(layer, 0, precision))
        name = "base_factor" if precision is Precision.BASE else "fp4_factor"
        return found.arrays[name].astype(np.float32, copy=False)

    def _layer(self, key: RowKey) -> PackLayer:
        """The layer of `key`; raises PackError for a row that does not exist."""
        layer = self._pack.layers.get(key.layer)
        if layer is None or not 0 <= key.expert < self.num_experts:
            raise PackError(f"{self._pack.path}: has no layer {key.layer} expert {key.expert}.")
        _, layout = layer.layout.rows(key.precision)
        here = (
            key.precision is Precision.BASE
            or layer.layout.fp4_in_pack
            or self._checkpoint is not None
        )
        if key.precision is not layout.precision or not here:
            raise PackError(
                f"{layer.path}: has no {key.precision} row of expert {key.expert}.",
                "FP4 rows need the checkpoint, or a pack made with them.",
            )
        return layer

    def _read_own(self, layer: PackLayer, key: RowKey, out: U8) -> int:
        """Reads the rank's slices and, if it has the last one, the padding that belongs to it."""
        name, whole = layer.layout.rows(key.precision)
        local = self.layouts[key.precision]
        begin = layer.layout.row_offset(key.precision, key.expert)
        begin += self._rank * local.payload_bytes
        row, padding = out[: local.payload_bytes], out[local.payload_bytes : local.row_bytes]
        buffers = [out[: local.row_bytes]]
        if self._size > 1:
            padding[:] = 0
            rest = whole.row_bytes - whole.payload_bytes if self._rank + 1 == self._size else 0
            padding = np.empty(rest, np.uint8)
            buffers = [row, padding] if rest else [row]
        try:
            done = self._files[key.layer].read(buffers, begin)
        except (OSError, EOFError) as error:
            raise PackError(f"{_name(layer, key)}: cannot be read ({error}).", REPAIR) from None
        if self._verify:
            digests = layer.arrays[f"{name}_blake3"][key.expert]
            first, last = self._rank * local.slices, self._rank * local.slices + local.slices - 1
            for index in range(first, last + 1):
                at = (index - first) * local.slice_bytes
                hasher = blake3(row[at : at + local.slice_bytes].data)
                if index == last:
                    hasher.update(padding.data)
                if hasher.digest() != digests[index].tobytes():
                    raise PackError(
                        f"{_name(layer, key)}: the {key.precision} row is damaged (slice {index} "
                        f"fails its checksum).",
                        REPAIR,
                    )
        return done


def _name(layer: PackLayer, key: RowKey) -> str:
    return f"{layer.path}: layer {key.layer} expert {key.expert}"
