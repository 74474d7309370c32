"""PackRowSource: which rows there are, which bytes are checked, and what an error names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError, ConfigError, PackError, UnsupportedError
from moet.formats import Matrix, Precision, RowLayout, encode_row
from moet.pack import Pack, PackRowSource, RowKey, verify_pack
from moet.pack.kernel_order import PackedMatrix, encode_packed_row
from tests.pack.conftest import Case

BASE, NVFP4, MXFP4 = Precision.BASE, Precision.NVFP4, Precision.MXFP4


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def row(source: PackRowSource, key: RowKey) -> np.ndarray:
    out = np.empty(source.layouts[key.precision].row_bytes, np.uint8)
    source.read(key, out)
    return out


@pytest.mark.parametrize("index", [0, 1])
def test_a_damaged_slice_is_named_and_the_other_rank_does_not_read_it(
    own_copy: Case, index: int
) -> None:
    pack = Pack.open(own_copy.pack)
    layer = pack.layers[1]
    layout = layer.layout.base
    assert layout.slices == 2
    begin = layer.layout.row_offset(BASE, 3)
    flip(layer.path, begin + index * layout.slice_bytes + 5)
    key = RowKey(1, 3, BASE)
    with PackRowSource(pack) as source:
        with pytest.raises(PackError, match=f"layer-00001.*layer 1 expert 3.*slice {index}"):
            row(source, key)
        row(source, RowKey(1, 2, BASE))
    with PackRowSource(pack, tp_rank=1 - index, tp_size=2) as source:
        row(source, key)
    with (
        PackRowSource(pack, tp_rank=index, tp_size=2) as source,
        pytest.raises(PackError, match=f"expert 3.*slice {index}"),
    ):
        row(source, key)
    with PackRowSource(pack, verify=False) as source:
        row(source, key)  # what was asked for
    (problem,) = verify_pack(own_copy.pack)
    assert (problem.layer, problem.expert, problem.precision, problem.slice) == (1, 3, BASE, index)
    assert problem.file == str(layer.path)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_padding_of_a_row_is_checked(own_copy: Case, tp_size: int) -> None:
    pack = Pack.open(own_copy.pack)
    layer = pack.layers[1]
    assert layer.layout.base.payload_bytes < layer.layout.base.row_bytes
    flip(layer.path, layer.layout.row_offset(BASE, 1) - 1)
    with (
        PackRowSource(pack, tp_rank=tp_size - 1, tp_size=tp_size) as source,
        pytest.raises(PackError, match=r"expert 0.*slice 1"),
    ):
        row(source, RowKey(1, 0, BASE))


def test_a_changed_checkpoint_is_refused_when_its_row_is_read(own_copy: Case) -> None:
    pack = Pack.open(own_copy.pack)
    with Checkpoint.open(own_copy.checkpoint) as checkpoint:
        # In the middle of the codes, where the checkpoint's identity does not look.
        ref = checkpoint.locate(1, 2)["up"]["codes"]
        flip(own_copy.checkpoint / ref.file, ref.offset + ref.nbytes // 2)
    with Checkpoint.open(own_copy.checkpoint) as checkpoint:
        try:
            pack.check_model(checkpoint)
        except PackError:
            pytest.skip("the flip was noticed at once")
        with PackRowSource(pack, checkpoint) as source:
            with pytest.raises(CheckpointError, match=f"{ref.file}.*layer 1 expert 2"):
                row(source, RowKey(1, 2, NVFP4))
            row(source, RowKey(1, 1, NVFP4))
        (problem,) = verify_pack(own_copy.pack, checkpoint=checkpoint)
    assert (problem.layer, problem.expert, problem.precision) == (1, 2, NVFP4)
    assert ref.file in problem.file
    assert verify_pack(own_copy.pack) == []


def test_which_rows_there_are(nvfp4: Case) -> None:
    pack = Pack.open(nvfp4.pack)
    with Checkpoint.open(nvfp4.checkpoint) as checkpoint, PackRowSource(pack, checkpoint) as source:
        assert set(source.layouts) == {BASE, NVFP4, MXFP4}
        assert source.layers == (1, 2)
        assert source.identity == pack.digest
        row(source, RowKey(1, 0, NVFP4))
        row(source, RowKey(2, 0, MXFP4))
        for key in (RowKey(1, 0, MXFP4), RowKey(2, 0, NVFP4), RowKey(0, 0, BASE)):
            with pytest.raises(PackError, match="has no"):
                source.read(key, np.empty(1 << 16, np.uint8))
        for expert in (-1, 4):
            with pytest.raises(PackError, match=f"expert {expert}"):
                source.read(RowKey(1, expert, BASE), np.empty(1 << 16, np.uint8))
    with PackRowSource(pack) as source:
        assert set(source.layouts) == {BASE, MXFP4}  # NVFP4 is in the checkpoint
        with pytest.raises(PackError, match="checkpoint"):
            source.read(RowKey(1, 0, NVFP4), np.empty(1 << 16, np.uint8))


def test_a_pack_of_another_model_is_refused(make_case: Callable[[str], Case]) -> None:
    one, other = make_case("deepseek-nvfp4"), make_case("qwen-bf16")
    pack = Pack.open(one.pack)
    with (
        Checkpoint.open(other.checkpoint) as checkpoint,
        pytest.raises(PackError, match=r"architecture is Deepseek.*, not Qwen"),
    ):
        PackRowSource(pack, checkpoint)


def test_a_fine_tune_of_the_same_model_is_refused(own_copy: Case) -> None:
    pack = Pack.open(own_copy.pack)
    with Checkpoint.open(own_copy.checkpoint) as checkpoint:
        begin, file = min((ref.offset, ref.file) for ref in checkpoint.tensors.values())
    flip(own_copy.checkpoint / file, begin)
    with (
        Checkpoint.open(own_copy.checkpoint) as checkpoint,
        pytest.raises(PackError, match="content is another"),
    ):
        pack.check_model(checkpoint)


def test_impossible_ranks(nvfp4: Case) -> None:
    pack = Pack.open(nvfp4.pack)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        PackRowSource(pack, tp_rank=2, tp_size=2)
    with pytest.raises(UnsupportedError, match="2 slices"):
        PackRowSource(pack, tp_size=4)


def test_a_layer_file_cut_while_it_is_served(own_copy: Case, direct_io: bool) -> None:
    pack = Pack.open(own_copy.pack)
    with PackRowSource(pack, direct_io=direct_io) as source:
        os.truncate(pack.layers[1].path, pack.layers[1].layout.row_offset(BASE, 2) + 100)
        row(source, RowKey(1, 1, BASE))
        with pytest.raises(PackError, match=r"layer 1 expert 2.*ends early"):
            row(source, RowKey(1, 2, BASE))


def test_reading_after_close(nvfp4: Case) -> None:
    with PackRowSource(Pack.open(nvfp4.pack)) as source:
        pass
    with pytest.raises(PackError, match="cannot be read"):
        row(source, RowKey(1, 0, BASE))


def test_threads_read_the_same(case: Case, direct_io: bool) -> None:
    pack = Pack.open(case.pack)
    with (
        Checkpoint.open(case.checkpoint) as checkpoint,
        PackRowSource(pack, checkpoint, direct_io=direct_io) as source,
    ):
        keys = [
            RowKey(layer, expert, precision)
            for layer in source.layers
            for expert in range(source.num_experts)
            for precision in (BASE, pack.layers[layer].layout.fp4.precision)
        ]
        truth = {key: row(source, key) for key in keys}
        wrong: list[object] = []

        def read(shift: int) -> None:
            try:
                for key in keys[shift:] + keys[:shift]:
                    if not np.array_equal(row(source, key), truth[key]):
                        wrong.append(key)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=read, args=(shift,)) for shift in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.mark.parametrize("precision", [NVFP4, MXFP4])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_codes_go_where_encode_row_puts_them(precision: Precision, ranks: int) -> None:
    hidden, intermediate, slices = 96, 256, 4
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> tuple[PackedMatrix, Matrix]:
        packed = rng.integers(0, 256, (n, k // 2), np.uint8)
        scales = rng.integers(0, 256, (n, k // precision.block), np.uint8)
        codes = np.stack([packed & 15, packed >> 4], -1).reshape(n, k)
        return PackedMatrix(packed.view(np.uint32), scales), Matrix(codes, scales)

    gate, up = matrix(intermediate, hidden), matrix(intermediate, hidden)
    down = matrix(hidden, intermediate)
    whole = RowLayout(precision, hidden, intermediate, slices)
    truth = np.empty(whole.row_bytes, np.uint8)
    encode_row(whole, gate[1], up[1], down[1], truth)
    local, joined = whole.local(ranks), []
    for rank in range(ranks):
        out = np.full(local.row_bytes, 0xFF, np.uint8)
        encode_packed_row(local, rank * local.slices, gate[0], up[0], down[0], out)
        joined.append(out[: local.payload_bytes])
        assert not out[local.payload_bytes :].any()
    assert np.array_equal(np.concatenate(joined), truth[: whole.payload_bytes])
