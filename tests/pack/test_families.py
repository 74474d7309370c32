"""Every family and form: a checkpoint as published → a pack whose rows are what was published."""

from __future__ import annotations

import numpy as np
import pytest

from moet.checkpoints import Checkpoint
from moet.errors import CheckpointError
from moet.formats import Precision
from moet.pack import Pack, PackRowSource, RowKey, write_pack
from moet.pack.checkpoint_rows import CheckpointRows
from moet.quantize import QUANTIZERS, MatrixContext
from tests.fixtures.checkpoints import write_checkpoint
from tests.pack.official import Official
from tests.pack.test_round_trip import PROJECTIONS, best_mxfp4, weights_of

# family, format, further arguments of `write_checkpoint`
CASES = [
    ("deepseek_v3", "fp8_block", {"dense_fp8": True}),
    ("deepseek_v3", "nvfp4", {"mtp_format": "bf16"}),
    ("deepseek_v4", "mxfp4", {"dense_fp8": True}),
    ("deepseek_v4", "fp8_block", {"dense_fp8": True}),
    ("deepseek_v4", "nvfp4", {"dense_fp8": True}),
    ("deepseek_v4_0731", "mxfp4", {"dense_fp8": True}),
    ("glm4_moe", "bf16", {}),
    ("glm4_moe", "nvfp4", {"mtp_format": "bf16"}),
    ("glm_moe_dsa", "nvfp4", {"mtp_format": "bf16"}),
    ("glm_moe_dsa", "fp8_block", {"dense_fp8": True}),
    ("gpt_oss", "mxfp4", {}),
    ("gpt_oss", "bf16", {}),
    ("kimi_k2", "int4_group", {}),
    ("kimi_k25", "nvfp4", {}),
    ("kimi_k25", "int4_group", {}),
    ("llama4", "bf16", {"top_k": 1}),
    ("llama4_text", "bf16", {"top_k": 1}),
    ("minimax_m2", "fp8_block", {"dense_fp8": True}),
    ("qwen3_moe", "fp8_block", {"dense_fp8": True}),
    ("qwen3_next", "bf16", {}),
    ("qwen3_next", "fp8_block", {"dense_fp8": True}),
]
LAYERS = 2


@pytest.mark.parametrize(
    ("family", "format", "more"), CASES, ids=[f"{of[0]}-{of[1]}" for of in CASES]
)
def test_rows_are_what_was_published(tmp_path, family, format, more):
    path = write_checkpoint(
        tmp_path / "model", family, format, layers=LAYERS, experts=3, vocab=32, **more
    )
    for with_fp4 in (False, True) if format in ("mxfp4", "nvfp4") else (False,):
        compare(path, tmp_path / f"pack-{with_fp4}", family, format, more, with_fp4)


def compare(path, out, family, format, more, with_fp4):
    quantizer = QUANTIZERS["data-free"]()
    official = Official(path, family, LAYERS)
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, out, quantizer=quantizer, with_fp4=with_fp4)
        pack = Pack.open(out)
        with PackRowSource(pack, checkpoint) as source:
            assert source.layers == checkpoint.geometry.moe_layers
            for layer in source.layers:
                draft = layer in checkpoint.geometry.mtp_layers
                stored = more.get("mtp_format", format) if draft else format
                assert checkpoint.expert_format(layer) == stored
                entry = pack.layers[layer].layout
                own = stored in ("mxfp4", "nvfp4")
                assert entry.fp4_in_pack == (with_fp4 or not own)
                for expert in range(source.num_experts):
                    truth = official.expert(layer, expert)
                    base = weights_of(source, pack, RowKey(layer, expert, Precision.BASE))
                    high = weights_of(source, pack, RowKey(layer, expert, entry.fp4.precision))
                    for which, weight, two_bit, fp4 in zip(
                        PROJECTIONS, truth, base, high, strict=True
                    ):
                        context = MatrixContext(layer, expert, which)
                        expected = quantizer.quantize(
                            np.ascontiguousarray(weight, np.float32), context
                        )
                        assert np.array_equal(two_bit.astype(np.float32), expected.decode())
                        assert np.array_equal(fp4, weight if own else best_mxfp4(weight))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v4", "kimi_k25"])
def test_ranks_read_their_slices_of_the_checkpoint(tmp_path, family):
    """FP4 that stays in the checkpoint, cut for two ranks; in stacks too."""
    format = "nvfp4" if family == "kimi_k25" else "mxfp4"
    path = write_checkpoint(tmp_path / "model", family, format, layers=LAYERS, experts=3, vocab=32)
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", quantizer=QUANTIZERS["data-free"]())
        pack = Pack.open(tmp_path / "pack")
        key = RowKey(checkpoint.geometry.moe_layers[-1], 2, Precision(format))
        with PackRowSource(pack, checkpoint) as source:
            layout = source.layouts[key.precision]
            row = np.empty(layout.row_bytes, np.uint8)
            assert source.read(key, row) < 1.2 * checkpoint.expert_bytes(key.layer)
        for rank in range(2):
            with PackRowSource(pack, checkpoint, tp_rank=rank, tp_size=2) as source:
                local = source.layouts[key.precision]
                half = np.empty(local.row_bytes, np.uint8)
                source.read(key, half)
                start = rank * local.payload_bytes
                size = local.payload_bytes
                assert np.array_equal(half[:size], row[start : start + size])


def test_a_changed_stack_fails_its_checksum(tmp_path):
    """Of a stack, gate's rows and up's are each under a checksum though they are read as one."""
    path = write_checkpoint(tmp_path / "model", "gpt_oss", "mxfp4", layers=1, experts=3, vocab=32)
    with Checkpoint.open(path) as checkpoint:
        write_pack(checkpoint, tmp_path / "pack", quantizer=QUANTIZERS["data-free"]())
        ref = checkpoint.locate(0, 1)["gate"]["codes"]
    pack = Pack.open(tmp_path / "pack")
    whole = (path / ref.file).read_bytes()
    row_bytes = ref.nbytes // ref.shape[0]
    for row in (0, 1):  # of gate, of up
        damaged = bytearray(whole)
        damaged[ref.offset + row * row_bytes] ^= 0x11
        (path / ref.file).write_bytes(damaged)
        with Checkpoint.open(path) as checkpoint, CheckpointRows(pack, checkpoint) as rows:
            rows.check(RowKey(0, 0, Precision.MXFP4))
            with pytest.raises(CheckpointError, match="layer 0 expert 1"):
                rows.check(RowKey(0, 1, Precision.MXFP4))
