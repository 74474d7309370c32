"""Headline checkpoints (headers only) and the `moet` command, for the planner's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from moet.plan.inventory import Inventory, take_inventory
from moet.plan.model_files import ModelFiles, open_model
from tests.cli.conftest import moet
from tests.plan.headline import HEADLINE

__all__ = ["moet"]


@pytest.fixture(scope="session")
def headline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name → directory of each headline model's headers."""
    root = tmp_path_factory.mktemp("headline")
    return {name: write(root / name) for name, write in HEADLINE.items()}


@pytest.fixture(scope="session")
def opened(headline: dict[str, Path]) -> dict[str, tuple[ModelFiles, Inventory]]:
    """Name → the model's files and its inventory."""
    found = {}
    for name, path in headline.items():
        files = open_model(str(path))
        found[name] = files, take_inventory(files)
    return found
