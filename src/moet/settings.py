"""What a user can set, with `--additional-config '{"moet": {...}}'` or options of `moet serve`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from moet.errors import ConfigError
from moet.kernels import OPERATORS
from moet.residency.policy import POLICIES
from moet.residency.sizing import size_pool

_POOL_HELP = (
    '"auto" (what fits in free memory), a share of all rows ("25%"), bytes ("12GiB") '
    'or a number of slots ("512")'
)


class Settings(BaseModel):
    """Everything that can be set; immutable, and every field has a default that serves."""

    # A number of slots may be given as a number.
    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    pack: Path | None = Field(
        default=None,
        description="The pack of the routed experts, a directory. Default: the model's own place "
        "under ~/.cache/moet/packs.",
    )
    precision: str = Field(
        default="base",
        min_length=1,
        description='Which experts run at FP4: none ("base"), all ("fp4"), or those that a map of '
        "`moet map` names (its name, or the path of a JSON file). Draft (MTP) layers run at FP4 "
        "with each of them unless the map names them.",
    )
    base_pool: str = Field(
        default="auto", description=f"Room for 2-bit rows, a rank: {_POOL_HELP}."
    )
    fp4_pool: str = Field(default="auto", description=f"Room for FP4 rows, a rank: {_POOL_HELP}.")
    policy: str = Field(
        default="lru", description="Which row makes room for a new one: lru, lfu, static."
    )
    streaming_slots: int = Field(
        default=8,
        ge=1,
        le=4096,
        description="Slots that prefill passes its rows through without evicting what decode uses.",
    )
    io_threads: int = Field(
        default=4, ge=1, le=256, description="Threads that read rows from disk."
    )
    direct_io: bool = Field(
        default=False,
        description="Read past the page cache (O_DIRECT); saves RAM when the pool is large.",
    )
    verify: Literal["read", "open"] = Field(
        default="read",
        description="When checksums are checked: of every row as it is read, or of the whole "
        "pack once at start.",
    )
    heat_file: Path | None = Field(
        default=None,
        description="Where to keep which experts were hot, so that the next start is warm.",
    )
    operator: str = Field(
        default="auto",
        description='Kernels for the routed experts: "auto" (the fast one of the platform), "cpu", '
        'or "reference" (plain torch in float32, slow).',
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of the CPU kernels, a rank. Default: torch's.",
    )

    @field_validator("base_pool", "fp4_pool")
    @classmethod
    def _is_a_size(cls, value: str, info: ValidationInfo) -> str:
        size_pool(value, name=str(info.field_name), rows=1, row_bytes=1, available=1)
        return value

    @field_validator("policy")
    @classmethod
    def _is_a_policy(cls, value: str) -> str:
        POLICIES[value]
        return value

    @field_validator("operator")
    @classmethod
    def _is_an_operator(cls, value: str) -> str:
        if value != "auto":
            OPERATORS[value]
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from plain values.

        Raises ConfigError that names the key, what was given, and what to change.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"moet's settings must be a mapping of names to values, not {values!r}.",
                'Write --additional-config \'{"moet": {"base_pool": "25%"}}\'.',
            )
        for key in values:
            if key not in cls.model_fields:
                raise ConfigError(f"unknown setting {key!r}.", _suggestion(str(key)))
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            about = cls.model_fields[key.partition(".")[0]].description
            raise ConfigError(
                f"setting {key!r} cannot be {first['input']!r}: {first['msg']}.", about or ""
            ) from None

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Settings:
        """Settings from vLLM's `additional_config`: those under the key "moet", if it is there."""
        if not isinstance(additional_config, Mapping):
            return cls()
        return cls.parse(additional_config.get("moet", {}))


def _suggestion(key: str) -> str:
    near = difflib.get_close_matches(key, Settings.model_fields, n=1)
    known = ", ".join(Settings.model_fields)
    return f"Did you mean {near[0]!r}?" if near else f"The settings are: {known}."


def default_pack_path(model: str, identity: str) -> Path:
    """Where a model's pack lies when no path is given.

    Args:
        model: the name or path that the user serves; its last part names the directory.
        identity: the checkpoint's identity (`Checkpoint.identity`), hexadecimal.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name) or "model"
    return Path.home() / ".cache" / "moet" / "packs" / f"{name}-{identity[:12]}"
