"""Safetensors headers: the same as the reference reader on good files, one error on bad ones."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from moet.checkpoints.headers import Header, identity, read_header
from moet.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(10, dtype=torch.uint8),
    "c": torch.tensor(2.0),
    "d": torch.zeros(0, 4, dtype=torch.bfloat16),
    "e": torch.ones(4, 4).to(torch.float8_e4m3fn),
}


def header_of(path: Path) -> Header:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read_header(path.name, fd)
    finally:
        os.close(fd)


def write(path: Path, entries: object, data: bytes = b"") -> Path:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(begin: int, end: int, shape: object = None, dtype: object = "U8") -> dict[str, object]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_offsets_are_where_the_reference_reader_finds_the_bytes(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path, {"format": "pt"})
    data, loaded = path.read_bytes(), load_file(path)
    found = header_of(path).tensors
    assert found.keys() == loaded.keys()
    for name, ref in found.items():
        stored = loaded[name].flatten().view(torch.uint8).numpy().tobytes()
        assert data[ref.offset : ref.offset + ref.nbytes] == stored
        assert ref.shape == tuple(loaded[name].shape)


BAD = {
    "empty": (b"", b""),
    "not json": (b"{no}", b""),
    "not utf-8": (b'{"\xff\xff": 1}', b""),
    "a list": ([], b""),
    "deeply nested": (b"[" * 100_000, b""),
    "a huge number": (b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "entry is no object": ({"a": 3}, b""),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x"),
    "unknown dtype": ({"a": entry(0, 1, dtype="U9")}, b"x"),
    "unhashable dtype": ({"a": entry(0, 1, dtype=[])}, b"x"),
    "negative dimension": ({"a": entry(0, 1, [-1, -1])}, b"x"),
    "boolean dimension": ({"a": entry(0, 1, [True])}, b"x"),
    "fractional dimension": ({"a": entry(0, 1, [1.0])}, b"x"),
    "shape is text": ({"a": entry(0, 1, "1")}, b"x"),
    "rank beyond reason": ({"a": entry(0, 1, [1] * 1000)}, b"x"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 2]}}, b"x"),
    "size and shape differ": ({"a": entry(0, 4, [3])}, b"xxxx"),
    "end before begin": ({"a": entry(4, 0, [0])}, b"xxxx"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, b"xxxxxx"),
    "hole": ({"a": entry(0, 2), "b": entry(4, 6)}, b"xxxxxx"),
    "past the end": ({"a": entry(0, 100)}, b"xxxx"),
    "bytes after the end": ({"a": entry(0, 2)}, b"xxxx"),
}


@pytest.mark.parametrize(("entries", "data"), BAD.values(), ids=BAD.keys())
def test_bad_header_is_one_error_that_names_the_file(tmp_path, entries, data):
    path = write(tmp_path / "bad.safetensors", entries, data)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        header_of(path)


@pytest.mark.parametrize("length", [0, 1, 10**8 + 1, 2**63, 2**64 - 1])
def test_absurd_header_length(tmp_path, length):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 50)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        header_of(path)


def test_truncation_at_every_byte_is_found(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file(TENSORS, path)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"m\.safetensors"):
            header_of(path)


@settings(max_examples=200)
@given(at=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_flipped_byte_never_leads_out_of_the_file(tmp_path_factory, at, value):
    path = tmp_path_factory.getbasetemp() / "flip.safetensors"
    save_file(TENSORS, path)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = value
    path.write_bytes(data)
    try:
        found = header_of(path)
    except CheckpointError:
        return
    for ref in found.tensors.values():
        assert 8 + len(found.raw) <= ref.offset <= ref.offset + ref.nbytes <= len(data)


def test_identity_sees_config_names_and_data(tmp_path):
    def of(tensors: dict[str, torch.Tensor], config: bytes = b"{}") -> str:
        save_file(tensors, tmp_path / "m.safetensors")
        return identity(config, [header_of(tmp_path / "m.safetensors")])

    tuned = TENSORS | {"a": TENSORS["a"] + 1}  # the same header: only the data differs
    renamed = {name.upper(): tensor for name, tensor in TENSORS.items()}
    assert of(TENSORS) == of(TENSORS)
    assert len({of(TENSORS), of(TENSORS, b"{ }"), of(tuned), of(renamed)}) == 4
