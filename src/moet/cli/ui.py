"""What the subcommands share on the screen: consoles, JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def emit_json(content: Any) -> None:
    """Machine-readable output: the only thing on standard output when `--json` is given."""
    print(json.dumps(content, indent=1, sort_keys=True))
