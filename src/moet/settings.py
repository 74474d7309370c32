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
from moet.residency.sizing import STREAMING_SLOTS, size_pool
from moet.residency.tiers.options import TierOptions

_POOL_HELP = (
    '"auto" (what fits), a share of all rows ("25%"), bytes ("12GiB") or a number of slots ("512")'
)
# What the other platform has no use for.
_GPU_ONLY = ("arena", "prefill_staging", "fp8_activations")
_CPU_ONLY = ("routing_trace", "threads")


class GateSettings(BaseModel):
    """The confidence gate: tokens of which the model is unsure are decided again at FP4."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tau: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Tokens whose most likely successor is less probable than this are decided "
        "again; 0: none, 1 or more: all, prompts too.",
    )
    cap: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="The largest share of a request's tokens, from its first on, that may be "
        "decided again.",
    )


class AdaptiveSettings(BaseModel):
    """The adaptive hot set: the experts that decoding uses most run at FP4."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every: int = Field(default=64, ge=1, le=65536, description="Steps between two decisions.")
    margin: float = Field(
        default=1.5,
        ge=1,
        allow_inf_nan=False,
        description="By what factor an expert must be used more than the one that it replaces.",
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
    gate: GateSettings | None = Field(
        default=None,
        description="The confidence gate, as {tau, cap}: tokens whose most likely successor is "
        "less probable than tau are decided again with all experts at FP4. Both can be changed "
        "while the server runs; without this setting there is no gate, and no memory for it.",
    )
    adaptive: AdaptiveSettings | None = Field(
        default=None,
        description="The adaptive hot set, as {every, margin}: the experts that decoding uses most "
        "run at FP4, as many as fp4_pool holds. What a request is answered then depends on what "
        "was served before it.",
    )
    prefill_precision: Literal["base", "fp4"] = Field(
        default="base",
        description="Experts of prompt tokens: as `precision` says, or all at FP4, which leaves a "
        "KV cache without the base's error.",
    )
    base_pool: str = Field(
        default="auto",
        description="Room for 2-bit rows, a rank, in GPU memory (in RAM where there is no GPU): "
        f"{_POOL_HELP}.",
    )
    fp4_pool: str = Field(default="auto", description=f"Room for FP4 rows, likewise: {_POOL_HELP}.")
    arena: str = Field(
        default="auto",
        description="GPU only. Pinned host memory, a rank, for rows that are not in GPU memory: "
        '"auto" (what fits), a share of all rows ("25%"), bytes of all rows together ("48GiB") or '
        "a number of rows of each precision.",
    )
    policy: str = Field(
        default="auto",
        description="Which row makes room for a new one: lru, lfu, static. Default: lru on the "
        "CPU, lfu on a GPU.",
    )
    streaming_slots: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Slots that rows pass through without evicting what decode uses, as prefill's "
        f"do. Default: {STREAMING_SLOTS} of a pool on the CPU; on a GPU, places of the arena for "
        "what a layer can need at once, at most half of them.",
    )
    prefill_staging: Literal[True, False, "auto"] = Field(
        default="auto",
        description="GPU only. Whether prefill copies whole layers through two buffers in GPU "
        "memory, or reads rows where they lie. Default: where not all rows are in GPU memory.",
    )
    fp8_activations: bool = Field(
        default=False,
        description="GPU only. Round what goes into the routed experts to FP8 where the GPU "
        "computes in FP8; without it, they have BF16's accuracy.",
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
    routing_trace: Path | None = Field(
        default=None,
        description="CPU only. Record which experts each step uses in this file, for `moet "
        "simulate`; it ends at 100 MB.",
    )
    operator: str = Field(
        default="auto",
        description='Kernels for the routed experts: "auto" (the fast one of the platform), "cpu", '
        '"cuda", or "reference" (plain torch in float32, slow).',
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads of the CPU kernels, a rank. Default: torch's.",
    )

    def ignored(self, *, gpu: bool) -> list[str]:
        """The settings, of those that were changed, that serving with or without a GPU ignores."""
        names = _CPU_ONLY if gpu else _GPU_ONLY
        return [n for n in names if getattr(self, n) != type(self).model_fields[n].default]

    @property
    def recovers(self) -> bool:
        """Whether experts are needed at FP4 besides the precision that each has."""
        return self.gate is not None or self.prefill_precision == "fp4"

    @property
    def pool_policy(self) -> str:
        """The policy of a CPU's pools."""
        return "lru" if self.policy == "auto" else self.policy

    @property
    def pool_streaming(self) -> int:
        """The streaming slots of each of a CPU's pools."""
        return STREAMING_SLOTS if self.streaming_slots is None else self.streaming_slots

    def tier_options(self, layer_rows: int | None = None) -> TierOptions:
        """How a GPU's tiers are managed. layer_rows: the most rows of a layer that a step can use
        (top-k × tokens in a step); None: all of them."""
        return TierOptions(
            policy=TierOptions.policy if self.policy == "auto" else self.policy,
            streaming=self.streaming_slots,
            io_threads=self.io_threads,
            layer_rows=layer_rows,
        )

    @field_validator("base_pool", "fp4_pool", "arena")
    @classmethod
    def _is_a_size(cls, value: str, info: ValidationInfo) -> str:
        size_pool(value, name=str(info.field_name), rows=1, row_bytes=1, available=1)
        return value

    @field_validator("policy")
    @classmethod
    def _is_a_policy(cls, value: str) -> str:
        if value != "auto":
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
