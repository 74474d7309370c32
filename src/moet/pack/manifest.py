"""`moet.json`: what a pack is, and the digests that anchor its layer files.

The file is, byte for byte, the canonical JSON of its content, and names its own BLAKE3: a flipped
byte anywhere is refused. Everything in it is bounded, because it may come from a stranger.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import Field, ValidationError, model_validator

from moet.checkpoints.base import Geometry
from moet.errors import PackError, UnsupportedError
from moet.formats.base import FORMATS
from moet.formats.layout import MAX_SLICES, Precision, RowLayout
from moet.pack.files import REMAKE
from moet.pack.layer import LayerLayout, layer_file_name
from moet.pack.statistics import LayerStatistics
from moet.pack.strict import Strict

MANIFEST_NAME = "moet.json"
MANIFEST_LIMIT = 64 * 2**20  # bytes; a thousand layers need a few MiB

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[^\x00-\x1f/\\]{1,255}$")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f]{1,1000}$")]
Index = Annotated[int, Field(ge=0, lt=100_000)]
Width = Annotated[int, Field(gt=0, le=2**20)]
Bytes = Annotated[int, Field(ge=0, lt=2**50)]


class CheckpointFile(Strict):
    """A safetensors file of the checkpoint; the FP4 index counts in this order."""

    name: Name
    bytes: Bytes


class Model(Strict):
    """Which checkpoint the pack was made from. source: `Checkpoint.identity`."""

    name: Text
    revision: Text | None
    source: Digest
    files: tuple[CheckpointFile, ...] = Field(min_length=1, max_length=10_000)

    @model_validator(mode="after")
    def _plain_names(self) -> Model:
        names = [file.name for file in self.files]
        if len(set(names)) != len(names) or {".", ".."} & set(names):
            raise ValueError("the checkpoint's file names are not plain and distinct")
        return self


class PackGeometry(Strict):
    """`checkpoints.base.Geometry`, bounded."""

    architecture: Text
    hidden: Width
    intermediate: Width
    num_experts: Annotated[int, Field(gt=0, le=2**13)]
    top_k: Annotated[int, Field(gt=0, le=2**13)]
    num_layers: Annotated[int, Field(gt=0, lt=100_000)]
    moe_layers: tuple[Index, ...] = Field(min_length=1, max_length=1_000)
    mtp_layers: tuple[Index, ...] = Field(max_length=1_000)
    swiglu_limit: Annotated[float, Field(gt=0)] | None

    @model_validator(mode="after")
    def _consistent(self) -> PackGeometry:
        if list(self.moe_layers) != sorted(set(self.moe_layers)):
            raise ValueError("moe_layers are not ascending")
        if list(self.mtp_layers) != sorted(set(self.mtp_layers) & set(self.moe_layers)):
            raise ValueError("mtp_layers are not among the moe_layers, ascending")
        if self.top_k > self.num_experts:
            raise ValueError("top_k exceeds num_experts")
        return self


class PackFormat(Strict):
    """The rows' form.

    row_bytes: of a whole row, for each precision that the pack's layers use.
    with_fp4: whether FP4 rows that the checkpoint has are in the pack all the same.
    """

    slices: Annotated[int, Field(ge=1, le=MAX_SLICES)]
    row_bytes: dict[Precision, Bytes]
    with_fp4: bool

    @model_validator(mode="after")
    def _power_of_two(self) -> PackFormat:
        if self.slices & (self.slices - 1):
            raise ValueError("slices are not a power of two")
        return self


class Quantizer(Strict):
    """Which quantizer made the base; level: its effort, 0 (data-free) to 3.

    calibration: BLAKE3 of the calibration that it used; None at level 0.
    """

    name: Text
    level: Annotated[int, Field(ge=0, le=3)]
    calibration: Digest | None


class Fp4(Strict):
    """A layer's FP4 rows: of which kind, and whether in the pack or the checkpoint's own files."""

    precision: Literal[Precision.MXFP4, Precision.NVFP4]
    stored: Literal["pack", "checkpoint"]


class Source(Strict):
    """How the checkpoint stores a layer's experts: block format, and bytes of all of them."""

    format: Text
    bytes: Bytes


class LayerEntry(Strict):
    """One layer file. blake3: of everything in it but the rows, which it holds the digests of."""

    layer: Index
    file: Name
    file_bytes: Bytes
    blake3: Digest
    fp4: Fp4
    source: Source
    statistics: LayerStatistics


class Recipe(Strict):
    """Everything that decides the pack's bytes, known before the first is written."""

    schema_version: Literal[1]
    writer: Text
    model: Model
    geometry: PackGeometry
    format: PackFormat
    quantizer: Quantizer


class Manifest(Recipe):
    """The content of `moet.json`."""

    layers: tuple[LayerEntry, ...] = Field(max_length=1_000)
    digest: Digest

    @model_validator(mode="after")
    def _layers_follow(self) -> Manifest:
        if tuple(entry.layer for entry in self.layers) != self.geometry.moe_layers:
            raise ValueError("layers are not the geometry's moe_layers")
        try:
            layouts = [self.layout(entry) for entry in self.layers]
        except UnsupportedError as error:
            raise ValueError(error.message) from None
        for entry, layout in zip(self.layers, layouts, strict=True):
            if (entry.file, entry.file_bytes) != (layer_file_name(entry.layer), layout.file_bytes):
                raise ValueError(f"layer {entry.layer}: name or size of its file is impossible")
        used = {item.precision: item.row_bytes for of in layouts for item in (of.base, of.fp4)}
        if self.format.row_bytes != used:
            raise ValueError("format.row_bytes does not follow from the geometry")
        if self.digest != content_digest(self.model_dump(mode="json")):
            raise ValueError("the content is not what the digest was made of")
        return self

    def layout(self, entry: LayerEntry) -> LayerLayout:
        """Where everything is in the file of `entry`."""
        return layer_layout(self.geometry, self.format.slices, entry.layer, entry.fp4)


def layer_layout(
    geometry: Geometry | PackGeometry, slices: int, layer: int, fp4: Fp4
) -> LayerLayout:
    """The layout of one layer's file; raises UnsupportedError for widths that do not tile."""

    def rows(precision: Precision) -> RowLayout:
        return RowLayout(precision, geometry.hidden, geometry.intermediate, slices)

    return LayerLayout(
        layer,
        geometry.num_experts,
        rows(Precision.BASE),
        rows(fp4.precision),
        0 if fp4.stored == "pack" else len(FORMATS[fp4.precision].parts),
    )


def canonical(content: dict[str, Any]) -> bytes:
    """The one serialisation of `content`: sorted keys, indented by one, UTF-8, a final newline."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def content_digest(content: dict[str, Any]) -> str:
    """BLAKE3, in hex, of the canonical serialisation of `content` without its `digest`."""
    rest = {key: value for key, value in content.items() if key != "digest"}
    return blake3(canonical(rest)).hexdigest()


def seal(recipe: Recipe, layers: Sequence[LayerEntry]) -> Manifest:
    """The manifest of a finished pack, with its digest."""
    fields = {name: getattr(recipe, name) for name in Recipe.model_fields}
    draft = Manifest.model_construct(**fields, layers=tuple(layers), digest="")
    digest = content_digest(draft.model_dump(mode="json"))
    return Manifest(**fields, layers=tuple(layers), digest=digest)


def differences(ours: Strict, theirs: Strict) -> list[str]:
    """`field: theirs, not ours` for each leaf in which two parts of one kind differ."""
    return list(_differences("", ours.model_dump(mode="json"), theirs.model_dump(mode="json")))


def _differences(where: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        for key in ours:
            yield from _differences(f"{where}.{key}".lstrip("."), ours[key], theirs[key])
    elif ours != theirs:
        shown = [text if len(text := str(value)) < 80 else "…" for value in (theirs, ours)]
        yield f"{where} is {shown[0]}, not {shown[1]}"


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """The manifest in `raw`, completely validated; raises PackError naming `path`."""
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise PackError(f"{path}: not a valid pack description ({reason}).", REMAKE) from None
    if canonical(manifest.model_dump(mode="json")) != raw:
        raise PackError(f"{path}: was edited: it is not in its canonical form.", REMAKE)
    return manifest
