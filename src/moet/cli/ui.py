"""What the subcommands share of what they put out: consoles, JSON, result files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from moet.errors import ConfigError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def emit_json(content: Any) -> None:
    """Machine-readable output: the only thing on standard output when `--json` is given."""
    print(json.dumps(content, indent=1, sort_keys=True))


def check_output(output: Path | None) -> None:
    """Raises ConfigError for a result file that cannot be written, long before it is."""
    if output is None:
        return
    place = next(path for path in output.absolute().parents if path.exists())
    if output.is_dir() or not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(
            f"--output {output} cannot be written.", "Name a file, in a place of yours."
        )
