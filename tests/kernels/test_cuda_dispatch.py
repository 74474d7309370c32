"""Which kernels a call goes through, against what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.bench.results import Row, read_result
from moet.kernels.cuda.dispatch import SEVERAL_TOKENS, decode_us, most_decoded, prefill_us
from moet.kernels.cuda.shape import ExpertsShape

SHAPES = {
    "DeepSeek-V4-Flash": ExpertsShape(4096, 2048, 8, 256, 6),
    "DeepSeek-V4-Flash TP2": ExpertsShape(4096, 1024, 8, 256, 6),
    "DeepSeek-V4-Flash TP4": ExpertsShape(4096, 512, 8, 256, 6),
    "GLM-5.2": ExpertsShape(6144, 2048, 8, 256, 8),
    "Kimi-K2.7": ExpertsShape(7168, 2048, 8, 384, 8),
    "Qwen3-30B-A3B": ExpertsShape(2048, 768, 8, 128, 8),
}


def measured() -> list[Row]:
    """All ways' times in µs."""
    path = Path(__file__).parents[2] / "bench/results/dispatch-h200.json"
    return list(read_result(path)["rows"])


def case_of(row: Row) -> str:
    return f"{row['model']}-{row['precision']}-{row['tokens']}"


@pytest.mark.parametrize("row", measured(), ids=case_of)
def test_the_way_taken_is_hardly_slower_than_the_other(row: Row) -> None:
    """At 2 bits; a layer all at FP4 may lose a fifth, for prefill gains on it earlier."""
    decoded = row["tokens"] <= most_decoded(SHAPES[row["model"]], SEVERAL_TOKENS)
    assert decoded == row["decoded"]
    taken, other = row["us_several"], row["us_prefill"]
    if not decoded:
        taken, other = other, taken
    assert taken < (1.05 if row["precision"] == "base" else 1.2) * other


@pytest.mark.parametrize("model", SHAPES)
def test_decoding_is_taken_as_long_as_its_launches_are_faster(model: str) -> None:
    shape = SHAPES[model]
    most = most_decoded(shape, 32)
    assert most > 32
    assert all(decode_us(shape, t, 32) <= prefill_us(shape, t) for t in range(17, most + 1))
    assert decode_us(shape, most + 1, 32) > prefill_us(shape, most + 1)


def test_a_shape_for_which_prefill_is_never_slower_decodes_few_tokens_all_the_same() -> None:
    assert most_decoded(ExpertsShape(32, 32, 1, 512, 32), 32) == 16
    assert most_decoded(ExpertsShape(32, 32, 1, 512, 64), 4) == 4
