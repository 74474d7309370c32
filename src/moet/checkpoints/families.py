"""The model families that moet knows, keyed by config.json's `architectures[0]`."""

from __future__ import annotations

from moet.checkpoints.base import FAMILIES, Family
from moet.checkpoints.deepseek import DeepseekV3, DeepseekV4, KimiK25
from moet.checkpoints.keys import Config
from moet.checkpoints.others import GptOss, Llama4, Llama4Text, MiniMaxM2
from moet.checkpoints.qwen import Qwen3Moe, Qwen3Next
from moet.errors import CheckpointError


def family_of(config: Config) -> Family:
    """The family that answers for a config.json.

    Raises CheckpointError for an architecture that no family knows.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise CheckpointError(
            f"config.json: the architecture {name!r} is not supported.",
            f"Supported: {', '.join(sorted(FAMILIES))}.",
        )
    return FAMILIES[name]


for _family in (
    DeepseekV3(),
    KimiK25(),
    DeepseekV4(),
    Qwen3Moe(),
    Qwen3Next(),
    MiniMaxM2(),
    GptOss(),
    Llama4(),
    Llama4Text(),
):
    for _architecture in _family.architectures:
        FAMILIES.register(_architecture)(_family)
