"""A recipe: the model, moet's settings and vLLM's options that serve it on some hardware."""

from __future__ import annotations

import difflib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from moet.errors import ConfigError
from moet.settings import Settings

Scalar = str | int | float | bool
_CODE = "it would run code that the recipe names"
# Options of vLLM that `moet serve` sets itself, or that a recipe from a stranger must not set.
_REFUSED = {
    "model": "it has a key of its own",
    "revision": "it has a key of its own",
    "quantization": "it is always moet",
    "additional-config": "moet's settings go under `moet`",
    "trust-remote-code": "moet never runs a model's code for you",
    "worker-cls": "moet sets it",
    "worker-extension-cls": "moet sets it",
    "scheduler-cls": "moet sets it",
    "config": "write its options here",
    "api-key": "give it on the command line",
    "io-processor-plugin": _CODE,
    "logits-processors": _CODE,
    "middleware": _CODE,
    "model-class-overrides": _CODE,
    "reasoning-parser-plugin": _CODE,
    "tool-parser-plugin": _CODE,
}


class Predicted(BaseModel):
    """What the planner expected: tokens/s as [low, typical, high]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    decode: tuple[float, float, float]
    prefill: tuple[float, float, float]


class Recipe(BaseModel):
    """One recipe, immutable; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="A hub name, or a checkpoint's directory.")
    revision: str | None = Field(default=None, description="The commit it was made for.")
    hardware: str = Field(min_length=1, description="What it is for, in words.")
    status: Literal["planned", "measured"] = Field(
        description="planned: computed from headers; measured: run, with a result file."
    )
    predicted: Predicted | None = None
    moet: dict[str, Any] = Field(default_factory=dict, description="Settings of moet.")
    vllm: dict[str, Scalar | dict[str, Scalar]] = Field(
        default_factory=dict, description="Options of `vllm serve`, without the dashes."
    )

    @field_validator("moet")
    @classmethod
    def _are_settings(cls, value: dict[str, Any]) -> dict[str, Any]:
        Settings.parse(value)
        return value

    @field_validator("vllm")
    @classmethod
    def _are_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            if why := _objection(key.replace("_", "-")):
                raise ValueError(f"option {key!r} cannot stand in a recipe: {why}")
        return value

    @classmethod
    def parse(cls, text: str, origin: str) -> Recipe:
        """A recipe from YAML. origin: the file, for errors. Raises ConfigError."""
        try:
            content = yaml.safe_load(text)
        except (yaml.YAMLError, RecursionError) as error:
            raise ConfigError(
                f"{origin} is not YAML: {error}.", "Correct it, or make one with `moet plan`."
            ) from None
        if not isinstance(content, dict):
            raise ConfigError(
                f"{origin} is no recipe: it is not a table of keys.",
                f"A recipe has: {', '.join(cls.model_fields)}.",
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"{origin}: key {key!r}: {first['msg']}.",
                f"A recipe has: {', '.join(cls.model_fields)}.",
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error.message}", error.hint) from None

    def to_yaml(self) -> str:
        """The recipe as a file's text."""
        content = self.model_dump(mode="json", exclude_none=True)
        for name in ("moet", "vllm"):
            if not content[name]:
                del content[name]
        return yaml.safe_dump(
            content, sort_keys=False, default_flow_style=None, width=100, allow_unicode=True
        )

    def vllm_arguments(self) -> list[str]:
        """The options as `vllm serve` takes them: true is a flag, false its `--no-` form.

        One argument each, so that no value can be taken for another option.
        """
        found = []
        for key, value in self.vllm.items():
            name = key.replace("_", "-")
            if isinstance(value, bool):
                found.append(f"--{name}" if value else f"--no-{name}")
            else:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                found.append(f"--{name}={text}")
        return found


def _objection(name: str) -> str | None:
    """Why an option, with dashes for underscores, cannot stand in a recipe; None if it can."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        return "write its name alone, without the dashes"
    # vLLM's parser takes the beginning of a name for the whole.
    return next((why for full, why in _REFUSED.items() if full.startswith(name)), None)


def recipe_names() -> list[str]:
    """The recipes that come with moet."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("moet.recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def find_recipe(text: str) -> Recipe | None:
    """The recipe that `text` names: a YAML file, or one that comes with moet; else None, as for a
    directory, whatever its name.

    Raises ConfigError for a recipe that is malformed or, being named as a file, is not there.
    """
    if Path(text).is_dir():
        return None
    if text.endswith((".yaml", ".yml")):
        path = Path(text).expanduser()
        try:
            return Recipe.parse(path.read_text(), text)
        except (OSError, UnicodeDecodeError) as error:
            near = difflib.get_close_matches(path.stem, recipe_names(), n=1)
            raise ConfigError(
                f"recipe {text} cannot be read: {error}.",
                f"Did you mean {near[0]}?" if near else "Name a file, or one of moet's recipes.",
            ) from None
    if text in recipe_names():
        return Recipe.parse((files("moet.recipes") / f"{text}.yaml").read_text(), text)
    return None
