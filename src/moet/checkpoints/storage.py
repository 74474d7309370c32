"""How official checkpoints store an expert matrix: tensor suffixes, dtypes and shapes by format.

Three forms are known: plain BF16; FP8 with 128 × 128 blocks as DeepSeek-V3 and Qwen3 publish it;
NVFP4 as NVIDIA's ModelOpt publishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moet.checkpoints.base import TensorRef
from moet.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredPart:
    """A part of a block format and the tensor that holds it.

    suffix: the tensor's name after the matrix's prefix. part: its name in `FORMATS[…].parts`.
    dtypes: safetensors dtypes it may have. shape: from the matrix's N and K.
    """

    suffix: str
    part: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], Shape]


@dataclass(frozen=True)
class Storage:
    """A stored form: the format's name, its parts, and suffixes that may be there but say nothing
    of the weights (`input_scale` is for quantized activations)."""

    format: str
    parts: tuple[StoredPart, ...]
    ignored: tuple[str, ...] = ()

    def match(
        self, tensors: Mapping[str, TensorRef], prefix: str, n: int, k: int
    ) -> dict[str, TensorRef]:
        """part → tensor of the matrix [n, k] at `prefix`.

        Raises CheckpointError when a tensor is missing or has another dtype or shape.
        """
        found = {}
        for stored in self.parts:
            name = f"{prefix}.{stored.suffix}"
            ref = tensors.get(name)
            if ref is None:
                raise CheckpointError(
                    f"tensor {name!r} is missing; {self.format} experts need it.",
                    "The checkpoint is incomplete, or its quantization_config is of another model.",
                )
            expected = stored.shape(n, k)
            scalar = expected == () and ref.shape == (1,)
            if ref.dtype not in stored.dtypes or not (ref.shape == expected or scalar):
                raise CheckpointError(
                    f"{ref.file}: tensor {name!r} is {ref.dtype} {list(ref.shape)}; {self.format} "
                    f"experts have {' or '.join(stored.dtypes)} {list(expected)}.",
                    "config.json and the tensors do not belong together.",
                )
            found[stored.part] = ref
        return found

    @property
    def suffixes(self) -> set[str]:
        return {stored.suffix for stored in self.parts} | set(self.ignored)


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


BF16 = Storage("bf16", (StoredPart("weight", "weight", ("BF16",), lambda n, k: (n, k)),))

FP8_BLOCK = Storage(
    "fp8_block",
    (
        StoredPart("weight", "weight", ("F8_E4M3",), lambda n, k: (n, k)),
        # DeepSeek stores these factors in float32, Qwen in bfloat16.
        StoredPart(
            "weight_scale_inv",
            "scale_inv",
            ("F32", "BF16"),
            lambda n, k: (_blocks(n, 128), _blocks(k, 128)),
        ),
    ),
)

NVFP4 = Storage(
    "nvfp4",
    (
        StoredPart("weight", "codes", ("U8",), lambda n, k: (n, k // 2)),
        StoredPart("weight_scale", "scale", ("F8_E4M3",), lambda n, k: (n, k // 16)),
        StoredPart("weight_scale_2", "global_scale", ("F32",), lambda n, k: ()),
    ),
    ignored=("input_scale",),
)


def declared_storage(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> Storage:
    """The form that config.json's `quantization_config` or hf_quant_config.json declares.

    Raises CheckpointError for a quantization that is not supported, or for two that differ.
    """
    declared = []
    if config.get("quantization_config") is not None:
        declared.append(_from_config(_table(config["quantization_config"], "config.json")))
    if modelopt is not None:
        settings = _table(modelopt, "hf_quant_config.json").get("quantization")
        declared.append(_from_modelopt(_table(settings, "hf_quant_config.json")))
    if not declared:
        return BF16
    if declared[0] is not declared[-1]:
        raise CheckpointError(
            f"config.json declares {declared[0].format} and hf_quant_config.json "
            f"{declared[-1].format}.",
            "Remove the file that does not belong to this checkpoint.",
        )
    return declared[0]


def _table(value: Any, file: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{file}: the quantization settings are not a table of keys.")
    return value


def _from_config(settings: Mapping[str, Any]) -> Storage:
    method = str(settings.get("quant_method"))
    if method.startswith("modelopt"):
        nested = settings.get("quantization")
        return _from_modelopt(settings if nested is None else _table(nested, "config.json"))
    if method == "fp8" and settings.get("weight_block_size") == [128, 128]:
        return FP8_BLOCK
    detail = f" with weight_block_size {settings.get('weight_block_size')}" * (method == "fp8")
    raise _unsupported(f"quant_method {method!r}{detail}")


def _from_modelopt(settings: Mapping[str, Any]) -> Storage:
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm == "NVFP4" and settings.get("group_size", 16) == 16:
        return NVFP4
    raise _unsupported(f"ModelOpt's {algorithm} with group_size {settings.get('group_size')}")


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(
        f"the quantization of this checkpoint is not supported: {what}.",
        "Supported: BF16, FP8 with 128 × 128 blocks, and ModelOpt's NVFP4.",
    )
