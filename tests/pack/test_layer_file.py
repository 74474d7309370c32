"""The layer files: any safetensors reader opens them, and rows are aligned."""

from __future__ import annotations

import json

import numpy as np
import pytest
from blake3 import blake3
from safetensors import safe_open

from moet.pack import Pack
from tests.pack.conftest import Case


def test_any_safetensors_reader_opens_the_files(case: Case) -> None:
    pack = Pack.open(case.pack)
    for layer in pack.layers.values():
        with safe_open(layer.path, "np") as file:
            assert file.metadata()["layer"] == str(layer.entry.layer)
            names = set(file.keys())
            for name, array in layer.arrays.items():
                assert np.array_equal(file.get_tensor(name), array)
            base = file.get_tensor("base")
            experts = pack.manifest.geometry.num_experts
            assert base.shape == (experts, layer.layout.base.row_bytes)
        if layer.layout.fp4_in_pack:
            fp4 = {"fp4", "fp4_blake3"}
        else:
            fp4 = {"fp4_index", "fp4_source_blake3"}
        assert names == {"base", "base_factor", "base_blake3", "fp4_factor"} | fp4


def test_rows_begin_on_4096_byte_offsets_and_the_base_comes_first(case: Case) -> None:
    for layer in Pack.open(case.pack).layers.values():
        raw = layer.path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert (8 + length) % 4096 == 0
        assert header["base"]["data_offsets"][0] == 0
        for name in {"base", "fp4"} & set(header):
            experts, row = header[name]["shape"]
            assert row % 4096 == 0
            assert header[name]["data_offsets"][0] % 4096 == 0
            assert (
                header[name]["data_offsets"][1] - header[name]["data_offsets"][0] == experts * row
            )


def test_a_slice_has_a_digest_and_the_last_one_covers_the_padding(case: Case) -> None:
    for layer in Pack.open(case.pack).layers.values():
        raw = layer.path.read_bytes()
        for precision in (layer.layout.base.precision, layer.layout.fp4.precision):
            name, row = layer.layout.rows(precision)
            if name not in layer.layout.row_tensors:
                continue
            for expert in range(layer.layout.experts):
                begin = layer.layout.row_offset(precision, expert)
                for index in range(row.slices):
                    start = begin + index * row.slice_bytes
                    stop = start + row.slice_bytes
                    if index + 1 == row.slices:
                        stop = begin + row.row_bytes
                    digest = layer.arrays[f"{name}_blake3"][expert, index].tobytes()
                    assert digest == blake3(raw[start:stop]).digest()


@pytest.mark.parametrize("name", ["qwen-nvfp4-wide", "qwen-bf16-wide"])
def test_the_wide_cases_have_unaligned_slices(name: str, make_case) -> None:
    """They are there for the sake of reads that do not begin on a multiple of 4096."""
    layer = next(iter(Pack.open(make_case(name).pack).layers.values()))
    assert layer.layout.base.slice_bytes % 4096
    assert layer.layout.base.slices >= 4
