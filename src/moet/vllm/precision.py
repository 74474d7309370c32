"""The precision policy: which experts run at FP4. It never depends on what was served before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moet.checkpoints.base import Geometry
from moet.errors import ConfigError

Level = Literal["base", "fp4"]
Experts = list[Annotated[int, Field(ge=0)]] | Literal["all"]


class PrecisionMap(BaseModel):
    """A map file: experts that run at another precision than the default.

    model: the identity of the checkpoint (`moet inspect` prints it). default: of every expert that
    no list names; draft layers (MTP) that no list names run at FP4. fp4, base: layer → experts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    default: Level = "base"
    fp4: dict[str, Experts] = Field(default_factory=dict)
    base: dict[str, Experts] = Field(default_factory=dict)


def named_map(pack: Path, name: str) -> Path:
    """Where the map of that name for a pack is kept: beside it."""
    return pack.with_name(f"{pack.name}.maps") / f"{name}.json"


def fp4_experts(
    setting: str, geometry: Geometry, identity: str, pack: Path | None = None
) -> Mapping[int, NDArray[np.bool_]]:
    """True for the experts that run at FP4: layer → bool [num_experts].

    Args:
        setting: `Settings.precision`: "base", "fp4", the name of a map that is kept beside the
            pack, or the path of a map file.
        identity: of the checkpoint, which a map must be made for.
        pack: the pack's directory; without it maps have no names.

    Raises ConfigError naming the file and the key.
    """
    if setting in ("base", "fp4"):
        return _fill(geometry, "fp4" if setting == "fp4" else "base")
    path = Path(setting)
    if pack is not None and path.name == setting and named_map(pack, setting).exists():
        path = named_map(pack, setting)
    content = _read(path)
    if content.model != identity:
        raise ConfigError(
            f"{path}: the map is for the model {content.model[:12]!r}, not {identity[:12]!r}.",
            "Make a map for this checkpoint, or set precision to base or fp4.",
        )
    result = _fill(geometry, content.default)
    for key in ("base", "fp4"):
        for name, experts in getattr(content, key).items():
            row = result.get(int(name)) if name.isdecimal() else None
            if row is None:
                raise ConfigError(
                    f"{path}: {key}.{name}: the model has no routed experts in that layer.",
                    f"Its layers are {_ranges(geometry.moe_layers)}.",
                )
            chosen = range(geometry.num_experts) if experts == "all" else experts
            if chosen and max(chosen) >= geometry.num_experts:
                raise ConfigError(
                    f"{path}: {key}.{name}: there is no expert {max(chosen)}.",
                    f"A layer has experts 0 to {geometry.num_experts - 1}.",
                )
            row[list(chosen)] = key == "fp4"
    overlap = sorted(set(content.base) & set(content.fp4), key=int)
    if overlap:
        raise ConfigError(
            f"{path}: layer {overlap[0]} is in both base and fp4.", "Name it in one of them."
        )
    return result


def _fill(geometry: Geometry, default: Level) -> dict[int, NDArray[np.bool_]]:
    # A draft head at 2 bits proposes tokens that the model then rejects, so it costs more than its
    # few bytes save.
    return {
        layer: np.full(geometry.num_experts, default == "fp4" or layer in geometry.mtp_layers)
        for layer in geometry.moe_layers
    }


def _read(path: Path) -> PrecisionMap:
    try:
        return PrecisionMap.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(
            f"precision {str(path)!r} is neither base nor fp4, nor a map of this pack, and is no "
            f"file that can be read ({error.strerror}).",
            "Set precision to base, fp4, or a map that `moet map` made: its name or its path.",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise ConfigError(f"{path}: {where}: {first['msg']}.", "Correct the map file.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}.", "Correct the map file.") from None


def _ranges(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if layers else "none"
