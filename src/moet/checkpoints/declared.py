"""Which block format a checkpoint's configs declare for its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moet.errors import CheckpointError


def declared_format(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> str:
    """The format of config.json's `quantization_config` or of hf_quant_config.json.

    Without either it is "bf16". A multimodal model may have the first in its `text_config`.

    Raises CheckpointError for a quantization that is not known, or for two that differ.
    """
    text = config.get("text_config")
    declared = [
        (where, _from_config(_table(table["quantization_config"], "config.json")))
        for where, table in (("config.json", config), ("config.json's text_config", text))
        if isinstance(table, Mapping) and table.get("quantization_config") is not None
    ]
    if modelopt is not None:
        settings = _table(modelopt, "hf_quant_config.json").get("quantization")
        declared.append(
            ("hf_quant_config.json", _from_modelopt(_table(settings, "hf_quant_config.json")))
        )
    if not declared:
        return "bf16"
    (first, form), (last, other) = declared[0], declared[-1]
    if form != other:
        raise CheckpointError(
            f"{first} declares {form} and {last} {other}.",
            "Remove the file that does not belong to this checkpoint.",
        )
    return form


def unsupported(what: str) -> CheckpointError:
    """The error for a quantization that moet does not read."""
    return CheckpointError(
        f"the quantization of this checkpoint is not supported: {what}.",
        "Supported: BF16, FP8 with 128 × 128 blocks, ModelOpt's NVFP4, MXFP4 (DeepSeek-V4, "
        "gpt-oss), and compressed-tensors' symmetric INT4 in groups of 32.",
    )


def _table(value: Any, file: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{file}: the quantization settings are not a table of keys.")
    return value


def _from_config(settings: Mapping[str, Any]) -> str:
    method = str(settings.get("quant_method"))
    if method.startswith("modelopt"):
        nested = settings.get("quantization")
        return _from_modelopt(settings if nested is None else _table(nested, "config.json"))
    if method == "compressed-tensors":
        return _from_compressed_tensors(settings)
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8" and settings.get("weight_block_size") == [128, 128]:
        return "fp8_block"
    detail = f" with weight_block_size {settings.get('weight_block_size')}" * (method == "fp8")
    raise unsupported(f"quant_method {method!r}{detail}")


def _from_modelopt(settings: Mapping[str, Any]) -> str:
    algorithm = str(settings.get("quant_algo")).upper()
    if algorithm == "NVFP4" and settings.get("group_size", 16) == 16:
        return "nvfp4"
    raise unsupported(f"ModelOpt's {algorithm} with group_size {settings.get('group_size')}")


def _from_compressed_tensors(settings: Mapping[str, Any]) -> str:
    """INT4 in groups, if that is all there is: of two groups, the experts could be in either."""
    groups = list(_table(settings.get("config_groups"), "config.json").values())
    wanted = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    wanted["symmetric"] = True
    group = _table(groups[0] if len(groups) == 1 else {}, "config.json")
    form = group.get("format") or settings.get("format")
    weights = _table(group.get("weights") or {}, "config.json")
    found = {key: weights.get(key) for key in wanted}
    if form == "pack-quantized" and found == wanted:
        return "int4_group"
    described = ", ".join(f"{key} {value}" for key, value in found.items())
    raise unsupported(
        f"compressed-tensors' {form!r} in {len(groups)} group(s), weights with {described}"
    )
