"""Packs from a stranger whose digests all fit, and whose content is impossible."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import PackError
from moet.pack import Pack, PackRowSource, verify_pack
from moet.pack.manifest import canonical, content_digest
from tests.pack.conftest import Case


def reseal(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits moet.json and makes its digest fit."""
    content = json.loads((path / "moet.json").read_bytes())
    change(content)
    content["digest"] = content_digest(content)
    (path / "moet.json").write_bytes(canonical(content))


def rewrite_tail(path: Path, index: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits a layer's small tensors and makes all digests fit."""
    layer = Pack.open(path).layers[index]
    arrays = {name: array.copy() for name, array in layer.arrays.items()}
    change(arrays)
    tail = layer.layout.join_tail(arrays)
    with layer.path.open("r+b") as file:
        file.seek(layer.layout.tail_start)
        file.write(tail)

    def entry(content: dict[str, Any]) -> None:
        for found in content["layers"]:
            if found["layer"] == index:
                found["blake3"] = layer.layout.tail_digest(tail)

    reseal(path, entry)


def test_resealing_as_such_is_not_noticed(own_copy: Case) -> None:
    """Else the tests below would pass for the wrong reason."""
    rewrite_tail(own_copy.pack, 1, lambda arrays: None)
    reseal(own_copy.pack, lambda content: content["model"].update(name="another name"))
    assert Pack.open(own_copy.pack).manifest.model.name == "another name"
    assert verify_pack(own_copy.pack) == []


def at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets one value."""

    def change(content: dict[str, Any]) -> None:
        node: Any = content
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value

    return change


IMPOSSIBLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "layer file elsewhere": at("layers", 0, "file", value="../layer-00001.safetensors"),
    "layer file of another layer": at("layers", 0, "file", value="layer-00002.safetensors"),
    "checkpoint file elsewhere": at("model", "files", 0, "name", value="/etc/passwd"),
    "checkpoint file above": at("model", "files", 0, "name", value=".."),
    "checkpoint file twice": lambda c: c["model"]["files"].append(c["model"]["files"][0]),
    "a NUL in a name": at("model", "files", 0, "name", value="a\0b"),
    "too many experts": at("geometry", "num_experts", value=2**40),
    "no experts": at("geometry", "num_experts", value=0),
    "negative width": at("geometry", "hidden", value=-128),
    "width that does not tile": at("geometry", "hidden", value=129),
    "slices that do not divide": at("format", "slices", value=8),
    "three slices": at("format", "slices", value=3),
    "rows of another size": at("format", "row_bytes", "base", value=4096),
    "a precision that is not used": at("format", "row_bytes", "int4", value=4096),
    "another size of the file": at("layers", 0, "file_bytes", value=4096),
    "a layer twice": lambda c: c["layers"].append(c["layers"][0]),
    "a layer fewer": lambda c: c["layers"].pop(),
    "another version": at("schema_version", value=2),
    "an unknown key": at("surprise", value=1),
    "more top-k than experts": at("geometry", "top_k", value=5),
    "draft layers that are not there": at("geometry", "mtp_layers", value=[7]),
    "statistics that do not follow": at("layers", 0, "statistics", "up", "bias", value=0.5),
    "FP4 of a third kind": at("layers", 0, "fp4", "precision", value="base"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_descriptions(own_copy: Case, name: str) -> None:
    reseal(own_copy.pack, IMPOSSIBLE[name])
    with pytest.raises(PackError, match=r"moet\.json: not a valid pack description"):
        Pack.open(own_copy.pack)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"digest": NaN}',
        b"[]",
        b"1" * 10_000,
    ],
)
def test_what_is_not_json_of_ours(own_copy: Case, raw: bytes) -> None:
    (own_copy.pack / "moet.json").write_bytes(raw)
    with pytest.raises(PackError, match=r"moet\.json"):
        Pack.open(own_copy.pack)


def test_a_key_twice(own_copy: Case) -> None:
    """Readers disagree on which one counts."""
    path = own_copy.pack / "moet.json"
    path.write_bytes(path.read_bytes().replace(b"{\n", b'{\n "writer": "moet",\n', 1))
    with pytest.raises(PackError, match=r"moet\.json"):
        Pack.open(own_copy.pack)


def test_a_description_without_end(own_copy: Case) -> None:
    os.truncate(own_copy.pack / "moet.json", 2**40)  # a sparse file; reading it would take all RAM
    with pytest.raises(PackError, match="too large"):
        Pack.open(own_copy.pack)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["base_factor", "fp4_factor"])
def test_factors_that_are_none(own_copy: Case, name: str, value: float) -> None:
    def change(arrays: dict[str, Any]) -> None:
        arrays[name][2, 1] = value

    rewrite_tail(own_copy.pack, 2, change)
    with pytest.raises(PackError, match=f"layer-00002.*{name} of expert 2"):
        Pack.open(own_copy.pack)


@pytest.mark.parametrize(
    "entry",
    [
        (-1, 4096, 16),
        (99, 4096, 16),
        (0, -1, 16),
        (0, 2**62, 16),
        (0, 4096, 2**62),
        (0, 2**62, 2**62),
        (0, 4096, 0),
        (0, 4096, -16),
    ],
)
def test_an_index_that_points_outside(own_copy: Case, entry: tuple[int, int, int]) -> None:
    def change(arrays: dict[str, Any]) -> None:
        arrays["fp4_index"][3, 2, 1] = entry

    rewrite_tail(own_copy.pack, 1, change)
    with pytest.raises(PackError, match=r"layer-00001.*fp4_index of expert 3"):
        Pack.open(own_copy.pack)


def test_an_index_that_is_of_another_form(own_copy: Case) -> None:
    """Within the file, but not as long as the checkpoint's tensors are."""

    def change(arrays: dict[str, Any]) -> None:
        arrays["fp4_index"][3, 2, 1, 2] -= 1

    rewrite_tail(own_copy.pack, 1, change)
    pack = Pack.open(own_copy.pack)
    with (
        Checkpoint.open(own_copy.checkpoint) as checkpoint,
        pytest.raises(PackError, match="does not fit the checkpoint"),
    ):
        PackRowSource(pack, checkpoint)


def test_a_pack_that_says_fp4_is_elsewhere(own_copy: Case) -> None:
    """The layout follows from it, and the file does not fit the layout."""
    reseal(own_copy.pack, at("layers", 1, "fp4", "stored", value="checkpoint"))
    with pytest.raises(PackError):
        Pack.open(own_copy.pack)


def test_a_truncated_layer_is_to_be_made_again(own_copy: Case) -> None:
    path = own_copy.pack / "layer-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(PackError, match=r"layer-00001.*truncated.*Copy the pack again, or make"):
        Pack.open(own_copy.pack)
