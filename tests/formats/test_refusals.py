"""What a damaged checkpoint holds is refused, with the part and the index in the message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moet.errors import CheckpointError, ConfigError, UnsupportedError
from moet.formats import FORMATS, fp4_matrix

RULES = {
    "mxfp4": "ocp",
    "nvfp4": "amax",
    "fp8_block": "amax",
    "int4_group": "amax",
    "bf16": "nearest",
}
Parts = dict[str, torch.Tensor]


def _parts(name: str) -> Parts:
    generator = torch.Generator().manual_seed(0)
    return FORMATS[name].encode(torch.randn(192, 256, generator=generator), RULES[name])


def _at(part: str, index: tuple[int, ...], byte_or_value: float) -> Callable[[Parts], None]:
    """Sets one element; of an FP8 part, by its byte."""

    def damage(parts: Parts) -> None:
        tensor = parts[part]
        (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor)[index] = byte_or_value

    return damage


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("mxfp4", _at("scale", (3, 5), 0xFF), r"'scale' holds .* at \[3, 5\]"),
        ("nvfp4", _at("scale", (3, 5), 0x7F), r"'scale' holds nan at \[3, 5\]"),
        ("nvfp4", _at("scale", (3, 5), 0xFF), r"'scale' holds nan at \[3, 5\]"),
        ("nvfp4", _at("scale", (3, 5), 0xB8), r"'scale' holds -1.0 at \[3, 5\]"),
        ("nvfp4", _at("scale", (3, 5), 0x80), r"'scale' holds -0.0 at \[3, 5\]"),
        ("nvfp4", _at("global_scale", (), torch.nan), r"'global_scale' holds nan"),
        ("nvfp4", _at("global_scale", (), torch.inf), r"'global_scale' holds inf"),
        ("nvfp4", _at("global_scale", (), -1.0), r"'global_scale' holds -1.0"),
        ("fp8_block", _at("weight", (130, 7), 0x7F), r"'weight' holds nan at \[130, 7\]"),
        ("fp8_block", _at("scale_inv", (1, 0), torch.nan), r"'scale_inv' holds nan at \[1, 0\]"),
        ("fp8_block", _at("scale_inv", (1, 0), torch.inf), r"'scale_inv' holds inf at \[1, 0\]"),
        ("fp8_block", _at("scale_inv", (1, 0), -0.5), r"'scale_inv' holds -0.5 at \[1, 0\]"),
        ("int4_group", _at("scale", (0, 7), torch.nan), r"'scale' holds nan at \[0, 7\]"),
        ("int4_group", _at("scale", (0, 7), -torch.inf), r"'scale' holds -inf at \[0, 7\]"),
        ("int4_group", _at("scale", (0, 7), -1.0), r"'scale' holds -1.0 at \[0, 7\]"),
        ("bf16", _at("weight", (2, 9), torch.nan), r"'weight' holds nan at \[2, 9\]"),
        ("bf16", _at("weight", (2, 9), torch.inf), r"'weight' holds inf at \[2, 9\]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bad_numbers_are_refused(
    name: str, damage: Callable[[Parts], None], message: str, dtype: torch.dtype
) -> None:
    parts = _parts(name)
    FORMATS[name].decode(parts, dtype)
    damage(parts)
    with pytest.raises(CheckpointError, match=message):
        FORMATS[name].decode(parts, dtype)
    if name in ("mxfp4", "nvfp4"):
        with pytest.raises(CheckpointError, match=message):
            fp4_matrix(name, parts)


def test_a_weight_beyond_float32_is_refused_in_float32_only() -> None:
    parts = {
        "codes": torch.full((1, 16), 0x77, dtype=torch.uint8),
        "scale": torch.full((1, 1), 254, dtype=torch.uint8),
    }
    assert FORMATS["mxfp4"].decode(parts, torch.float64).unique().item() == 6 * 2.0**127
    with pytest.raises(CheckpointError, match=r"holds inf at \[0, 0\].*float32"):
        FORMATS["mxfp4"].decode(parts)
    parts = _parts("fp8_block")
    parts["scale_inv"][1, 1] = 3e38
    FORMATS["fp8_block"].decode(parts, torch.float64)
    with pytest.raises(CheckpointError, match=r"'weight' holds -?inf at"):
        FORMATS["fp8_block"].decode(parts)


@pytest.mark.parametrize("name", RULES)
def test_missing_mistyped_and_misshapen_parts_are_refused(name: str) -> None:
    whole = _parts(name)
    for part, tensor in whole.items():
        missing = {key: value for key, value in whole.items() if key != part}
        with pytest.raises(CheckpointError, match=f"part '{part}' is missing"):
            FORMATS[name].decode(missing)
        with pytest.raises(CheckpointError, match=f"part '{part}' has dtype torch.int64"):
            FORMATS[name].decode(whole | {part: tensor.to(torch.float32).to(torch.int64)})
        cut = tensor[: len(tensor) // 2] if tensor.ndim else tensor.repeat(2)
        if list(whole) == ["weight"]:
            continue  # any matrix will do where there is only one part
        with pytest.raises(CheckpointError, match="has shape"):
            FORMATS[name].decode(whole | {part: cut})


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (4,), (2, 4, 32)])
def test_what_is_no_matrix_is_refused(name: str, shape: tuple[int, ...]) -> None:
    whole = _parts(name)
    first = FORMATS[name].parts[0]
    with pytest.raises(CheckpointError, match=f"part '{first}' has shape .* non-empty matrix"):
        FORMATS[name].decode(whole | {first: torch.zeros(shape).to(whole[first].dtype)})


@pytest.mark.parametrize(("name", "multiple"), [("mxfp4", 16), ("nvfp4", 8), ("int4_group", 4)])
def test_part_blocks_are_refused(name: str, multiple: int) -> None:
    whole = _parts(name)
    with pytest.raises(CheckpointError, match=f"'codes' has shape .* that {multiple} divides"):
        FORMATS[name].decode(whole | {"codes": whole["codes"][:, :-1]})
    with pytest.raises(UnsupportedError, match="blocks of"):
        FORMATS[name].encode(torch.zeros(4, 40), RULES[name])


@pytest.mark.parametrize("name", RULES)
def test_encoders_refuse_unknown_rules_and_weights_that_are_not_finite(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown scale rule 'best' of {name}.*{RULES[name]}"):
        FORMATS[name].encode(torch.zeros(32, 32), "best")
    weight = torch.zeros(32, 32)
    weight[3, 4] = torch.nan
    with pytest.raises(CheckpointError, match=r"'weight' holds nan at \[3, 4\]"):
        FORMATS[name].encode(weight, RULES[name])
    with pytest.raises(ValueError, match="float32 matrix"):
        FORMATS[name].encode(torch.zeros(32, 32, dtype=torch.float64), RULES[name])
