"""Opening a pack: everything but the rows is read and checked, nothing is trusted before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moet.checkpoints.reader import Checkpoint
from moet.errors import PackError
from moet.pack.files import REMAKE, StorageFile
from moet.pack.identity import geometry_of, model_of
from moet.pack.layer import Arrays, LayerLayout
from moet.pack.manifest import (
    MANIFEST_LIMIT,
    MANIFEST_NAME,
    CheckpointFile,
    LayerEntry,
    Manifest,
    differences,
    parse_manifest,
)


@dataclass(frozen=True)
class PackLayer:
    """An opened layer: its file, where everything in it is, and its small tensors by name."""

    entry: LayerEntry
    path: Path
    layout: LayerLayout
    arrays: Arrays


@dataclass(frozen=True)
class Pack:
    """A pack whose description, files and digests fit together; its rows are checked when read.

    Attributes:
        path: the directory. manifest: the content of `moet.json`. layers: by the model's index.
    """

    path: Path
    manifest: Manifest
    layers: Mapping[int, PackLayer]

    @classmethod
    def open(cls, path: str | Path) -> Pack:
        """Opens the pack in directory `path`; raises PackError naming the file that is wrong."""
        path = Path(path)
        manifest = read_manifest(path)
        layers = {entry.layer: open_layer(path, manifest, entry) for entry in manifest.layers}
        return cls(path, manifest, layers)

    @property
    def digest(self) -> str:
        """BLAKE3 of the description, and so of all digests in the pack: its identity."""
        return self.manifest.digest

    def check_model(self, checkpoint: Checkpoint) -> None:
        """Raises PackError, naming what differs, unless the pack was made from `checkpoint`."""
        manifest = self.manifest
        found = differences(geometry_of(checkpoint), manifest.geometry)
        theirs, ours = manifest.model, model_of(checkpoint)
        if not found and theirs.files != ours.files:
            found = ["the checkpoint's files, or their sizes, are others"]
        if not found and theirs.source != ours.source:
            found = ["the checkpoint's content is another (a fine-tune or another revision?)"]
        if found:
            raise PackError(
                f"{self.path}: is a pack of {theirs.name!r}, not of {ours.name!r} in "
                f"{checkpoint.path}: {'; '.join(found)}.",
                "Give the pack that was made from this checkpoint, or make it with `moet pack`.",
            )


def read_manifest(path: Path) -> Manifest:
    """The validated `moet.json` of the pack in directory `path`; raises PackError."""
    file = path / MANIFEST_NAME
    if not path.is_dir():
        raise PackError(f"{path}: there is no such pack.", "Make it with `moet pack`.")
    if not file.exists():
        raise PackError(
            f"{path}: is not a finished pack: it has no {MANIFEST_NAME}.",
            "Run `moet pack` again; it resumes where it was interrupted.",
        )
    with StorageFile(file) as storage:
        if storage.size > MANIFEST_LIMIT:
            raise PackError(f"{file}: is too large to be a pack's description.", REMAKE)
        return parse_manifest(_read(storage, 0, storage.size), file)


def open_layer(path: Path, manifest: Manifest, entry: LayerEntry) -> PackLayer:
    """Checks all of a layer's file but its rows; raises PackError naming the file."""
    layout = manifest.layout(entry)
    file = path / entry.file
    arrays = read_tail(file, layout, entry)
    _check_factors(file, arrays)
    if "fp4_index" in arrays:
        _check_index(file, arrays, manifest.model.files)
    return PackLayer(entry, file, layout, arrays)


def read_tail(file: Path, layout: LayerLayout, entry: LayerEntry) -> Arrays:
    """The small tensors of a layer's file, checked against `entry`; raises PackError."""
    with StorageFile(file) as storage:
        if storage.size != layout.file_bytes:
            raise PackError(
                f"{file}: has {storage.size} bytes, not {layout.file_bytes}; it is truncated or "
                f"of another pack.",
                REMAKE,
            )
        if _read(storage, 0, len(layout.header)) != layout.header:
            raise PackError(f"{file}: its header is not that of layer {layout.layer}.", REMAKE)
        tail = _read(storage, layout.tail_start, layout.file_bytes - layout.tail_start)
    if layout.tail_digest(tail) != entry.blake3:
        raise PackError(f"{file}: its factors and checksums are damaged.", REMAKE)
    return layout.split_tail(tail)


def _read(storage: StorageFile, offset: int, length: int) -> bytes:
    buffer = np.empty(length, np.uint8)
    try:
        storage.read([buffer], offset)
    except (OSError, EOFError) as error:
        raise PackError(f"{storage.path}: cannot be read ({error}).", REMAKE) from None
    return buffer.tobytes()


def _check_factors(file: Path, arrays: Arrays) -> None:
    for name in ("base_factor", "fp4_factor"):
        factors = arrays[name]
        bad = ~(np.isfinite(factors) & (factors >= 0)).all(axis=1)
        if bad.any():
            expert = int(bad.argmax())
            raise PackError(f"{file}: {name} of expert {expert} is not a factor.", REMAKE)


def _check_index(file: Path, arrays: Arrays, files: tuple[CheckpointFile, ...]) -> None:
    """Every entry must lie within a file of the checkpoint."""
    index = arrays["fp4_index"].astype(np.int64)
    number, offset, size = index[..., 0], index[..., 1], index[..., 2]
    good = (number >= 0) & (number < len(files)) & (offset >= 0) & (size > 0)
    limits = np.array([item.bytes for item in files], np.int64)
    good &= size <= limits[np.where(good, number, 0)]
    good &= offset <= limits[np.where(good, number, 0)] - size
    if not good.all():
        expert = int((~good).any(axis=(1, 2)).argmax())
        raise PackError(f"{file}: fp4_index of expert {expert} points outside its file.", REMAKE)
