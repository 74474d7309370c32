"""Streaming reader of official checkpoints: one expert at a time, never a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moet.checkpoints.base import (
    PROJECTIONS,
    ExpertSource,
    ExpertWeights,
    Family,
    Geometry,
    MatrixSource,
    Projection,
    TensorRef,
)
from moet.checkpoints.directory import (
    SINGLE,
    collect_tensors,
    read_json,
    repository_name,
    weight_map,
)
from moet.checkpoints.experts import LayerExperts, Located, match_experts
from moet.checkpoints.families import family_of
from moet.checkpoints.headers import identity
from moet.checkpoints.shards import LocalShards, Shards
from moet.checkpoints.storage import matrix_shape
from moet.closing import Closing
from moet.errors import CheckpointError
from moet.formats import FORMATS

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Checkpoint(Closing):
    """An official checkpoint, opened and checked; a context manager.

    Reading is thread-safe: every read fills fresh memory. Close it after the last one.

    Attributes:
        path: the directory of its configs. shards: the files of its tensors.
        name: its repository's or its own name. revision: the commit, where it is known, else None.
        config: config.json. identity: hash of the checkpoint in hex (see `headers.identity`).
        family, geometry: of the model; draft layers that the files leave out are left out here.
        tensors: every tensor of the checkpoint by name.
    """

    path: Path
    name: str
    revision: str | None
    config: Mapping[str, Any]
    identity: str
    family: Family
    geometry: Geometry
    tensors: Mapping[str, TensorRef]
    shards: Shards
    _layers: Mapping[int, LayerExperts]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens every shard and checks headers, index and expert tensors; reads no weights.

        Raises CheckpointError naming the file or tensor that is missing, damaged or unsupported.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not a directory.", "Give the directory of a downloaded checkpoint."
            )
        read_json(path / "config.json")  # what is missing first should be said first
        table = weight_map(path)
        shards = LocalShards(path, sorted(set(table.values())) if table else [SINGLE])
        try:
            return cls.assemble(path, *repository_name(path), table, shards)
        except BaseException:
            shards.close()
            raise

    @classmethod
    def assemble(
        cls,
        path: Path,
        name: str,
        revision: str | None,
        table: dict[str, str] | None,
        shards: Shards,
    ) -> Checkpoint:
        """The checkpoint whose configs are in `path` and whose tensors are in `shards`.

        table: the index (`directory.weight_map`). Raises CheckpointError as `open` does.
        """
        raw, config = read_json(path / "config.json")
        modelopt = path / "hf_quant_config.json"
        family = family_of(config)
        geometry = family.geometry(config)
        declared = family.declared_format(
            config, read_json(modelopt)[1] if modelopt.exists() else None
        )
        headers = shards.headers()
        tensors = collect_tensors(headers, table)
        geometry, layers = match_experts(family, geometry, tensors, declared)
        return cls(
            path,
            name,
            revision,
            config,
            identity(raw, headers),
            family,
            geometry,
            tensors,
            shards,
            layers,
        )

    def close(self) -> None:
        """Closes the files; reading afterwards is an error."""
        self.shards.close()

    def is_expert_tensor(self, name: str) -> bool:
        """Whether `name` is a tensor of one of the model's routed experts."""
        return self.family.is_expert_tensor(self.geometry, name)

    def expert_format(self, layer: int) -> str:
        """The block format of a layer's experts; draft layers may have another than the rest."""
        return self._layer(layer).storage.format

    def expert_bytes(self, layer: int) -> int:
        """Stored bytes of one expert of a layer, scales included."""
        # Of a stack, gate and up are one block.
        blocks = {(ref.file, ref.offset): ref.nbytes for ref in _refs(self.locate(layer, 0))}
        return sum(blocks.values())

    def locate(self, layer: int, expert: int) -> Located:
        """Where the parts of an expert's matrices are: projection → part → tensor.

        Of a stack, the expert's block, in which `block_rows` are the matrix's.
        """
        return self._layer(layer).located[expert]

    def block_rows(self, layer: int, projection: Projection) -> slice | None:
        """Which rows of the parts that `locate` finds are the matrix's; None for all of them."""
        n, _ = matrix_shape(self.geometry, projection)
        return self._layer(layer).storage.rows(projection, n)

    def read_expert(self, layer: int, expert: int) -> ExpertSource:
        """An expert's matrices as stored; reads the bytes of its parts and nothing else."""
        storage, located = self._layer(layer).storage, self.locate(layer, expert)
        # Of a stack, gate and up are read once.
        read: dict[tuple[str, int], Tensor] = {}
        matrices = []
        for projection in PROJECTIONS:
            shape = matrix_shape(self.geometry, projection)
            parts = {}
            for stored in storage.parts:
                ref = located[projection][stored.part]
                place = ref.file, ref.offset
                if place not in read:
                    read[place] = self._read(ref)
                part = storage.matrix_part(read[place], projection, shape[0])
                # Widens a BF16 scale and drops the dimension of a [1] factor: both exact.
                part = part.to(TORCH_DTYPES[stored.dtypes[0]])
                parts[stored.part] = part.reshape(()) if stored.shape(*shape) == () else part
            matrices.append(MatrixSource(storage.format, shape, parts))
        return ExpertSource(*matrices)

    def decode_expert(
        self, layer: int, expert: int, source: ExpertSource | None = None
    ) -> ExpertWeights:
        """An expert's weights, float32 (`BlockFormat.decode` has what that rounds).

        source: what `read_expert` returned, to save reading again.
        Raises CheckpointError naming the tensor and file whose scale is NaN, infinite or negative.
        """
        source = source or self.read_expert(layer, expert)
        matrices = (
            self._decode(source[projection], layer, expert, projection)
            for projection in PROJECTIONS
        )
        return ExpertWeights(*matrices)

    def read_tensor(self, name: str) -> Tensor:
        """Any tensor of the checkpoint, as stored."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.")
        return self._read(self.tensors[name])

    def _layer(self, layer: int) -> LayerExperts:
        if layer not in self._layers:
            raise CheckpointError(f"layer {layer} of {self.name} has no routed experts.")
        return self._layers[layer]

    def _decode(
        self, matrix: MatrixSource, layer: int, expert: int, projection: Projection
    ) -> Tensor:
        try:
            return FORMATS[matrix.format].decode(matrix.parts)
        except CheckpointError as error:
            refs = self.locate(layer, expert)[projection]
            # The format knows parts only; the user knows tensors.
            named = [ref for part, ref in refs.items() if f"part {part!r}" in error.message]
            ref = (named or list(refs.values()))[0]
            raise CheckpointError(
                f"{ref.file}: tensor {ref.name!r}: {error.message}", error.hint
            ) from None

    def _read(self, ref: TensorRef) -> Tensor:
        if ref.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{ref.file}: tensor {ref.name!r} has dtype {ref.dtype}.")
        # The device by name: inside vLLM the default one is the GPU.
        buffer = torch.empty(ref.nbytes, dtype=torch.uint8, device="cpu")
        self.shards.read(ref, buffer)
        return buffer.view(TORCH_DTYPES[ref.dtype]).reshape(ref.shape)


def _refs(located: Located) -> Iterable[TensorRef]:
    return (ref for parts in located.values() for ref in parts.values())
