"""What commands that start vLLM themselves take: moet's settings and vLLM's engine arguments."""

from __future__ import annotations

import json
import os
from typing import Any

from moet.errors import ConfigError
from moet.settings import Settings


def log_to_stderr() -> None:
    """Keeps vLLM's log off standard output, where results go; to be called before its import."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")


def assignment(text: str) -> tuple[str, Any]:
    """Key and value of `--set KEY=VALUE`; the value is JSON, or else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: no value.", "Write --set KEY=VALUE.")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def engine_settings(option: list[str] | None) -> dict[str, Any]:
    """moet's settings from `--set`, checked."""
    values = dict(assignment(text) for text in option or [])
    Settings.parse(values)
    return values


def engine_options(text: str) -> dict[str, Any]:
    """vLLM's engine arguments from `--engine`."""
    return json_object("--engine", text, 'Write \'{"dtype": "float32"}\'.')


def json_object(option: str, text: str, hint: str) -> dict[str, Any]:
    """The object that an option's value is; raises ConfigError with `hint` for anything else."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option} is not JSON: {error}.", hint) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{option} must be a JSON object.", hint)
    return content
