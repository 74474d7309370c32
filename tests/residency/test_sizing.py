"""From a size setting to slots."""

from __future__ import annotations

import psutil
import pytest

from moet.errors import ConfigError
from moet.residency.sizing import size_pool

GIB = 1 << 30


def slots(setting: str | int, **options: int) -> int:
    sizing = size_pool(setting, name="base_pool", rows=1000, row_bytes=10 << 20, **options)
    assert sizing.reason.startswith("base_pool: ")
    assert f"{sizing.slots} slots" in sizing.reason
    return sizing.slots


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("25%", 250),
        ("0.15 %", 2),
        ("100%", 1000),
        (128, 128),
        (" 128 ", 128),
        ("5000", 1000),
        ("0", 0),
        ("1GiB", 102),
        ("0.5 GiB", 51),
        ("1GB", 95),
        ("2TiB", 1000),
        ("100MiB", 10),
        ("1KB", 0),
    ],
)
def test_settings(setting: str | int, expected: int) -> None:
    assert slots(setting) == expected


@pytest.mark.parametrize("setting", ["", "-1", "12 parsecs", "12gib", "50 %%", "GiB", "1.5", "x%"])
def test_what_is_no_size_is_refused_by_name(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"^base_pool '.*' is not a size"):
        slots(setting)


def test_more_than_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than all"):
        slots("101%")


def test_auto_takes_all_rows_if_they_fit() -> None:
    assert slots("auto", available=12 * GIB, reserve=2 * GIB) == 1000
    assert slots("auto", available=3 * GIB, reserve=2 * GIB) == 102
    assert slots("auto", available=1 * GIB, reserve=2 * GIB) == 0


def test_auto_says_why() -> None:
    options = {"name": "fp4_pool", "rows": 1000, "row_bytes": 10 << 20, "reserve": 2 * GIB}
    some = size_pool("auto", available=3 * GIB, **options)
    assert "3.0 GiB of memory are available" in some.reason
    assert "102 of 1000 fit" in some.reason
    assert "all fit" in size_pool("auto", available=20 * GIB, **options).reason


def test_auto_asks_the_system() -> None:
    available = psutil.virtual_memory().available
    sizing = size_pool("auto", name="base_pool", rows=10**9, row_bytes=4096, reserve=0)
    assert sizing.slots * 4096 == pytest.approx(available, rel=0.5)
