"""From a size setting to a number of slots, with the reason in words."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import psutil

from moet.errors import ConfigError
from moet.units import byte_size

_UNITS = {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}

# Slots of a pool that prefill passes its rows through, unless the settings say otherwise.
STREAMING_SLOTS = 8

_FORMS = 'Write "25%", "12GiB", a number of slots, or "auto".'
_FORMS_OF_ROWS = 'Write "25%", "12GiB", or a number of rows.'

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Sizing:
    """slots: of a pool. reason: one plain sentence for the log."""

    slots: int
    reason: str


def fit_rows(rows: int, row_bytes: int, nbytes: int) -> int:
    """How many of `rows` rows fit into `nbytes`: what "auto" gives a pool, and what a plan counts
    on. nbytes may be negative (nothing fits)."""
    return min(rows, max(0, nbytes) // row_bytes)


def size_bytes(setting: str) -> int | None:
    """The bytes that a size setting names; None if it names none."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]i?B)", setting.strip())
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])


def share_rows(
    rows: Mapping[Kind, int],
    row_bytes: Mapping[Kind, int],
    nbytes: int,
    *,
    in_turn: bool = False,
) -> dict[Kind, int]:
    """How many rows of each kind fit into `nbytes` together.

    in_turn: the first kind gets all it wants, the next ones what is left; otherwise they share in
    proportion to the bytes of their rows.
    """
    wanted = sum(count * row_bytes[kind] for kind, count in rows.items())
    found: dict[Kind, int] = {}
    for kind, count in rows.items():
        part = nbytes if in_turn or wanted <= nbytes else nbytes * count * row_bytes[kind] // wanted
        found[kind] = fit_rows(count, row_bytes[kind], part)
        if in_turn or wanted <= nbytes:
            nbytes -= found[kind] * row_bytes[kind]
    return found


def size_rows(setting: str, *, name: str, rows: int, row_bytes: int) -> int:
    """The rows, of `rows`, that a size asks for which does not depend on this machine.

    Raises ConfigError naming the option, for "auto" too.
    """
    if setting.strip() == "auto":
        raise ConfigError(f"{name} 'auto' is impossible.", _FORMS_OF_ROWS)
    try:
        return size_pool(setting, name=name, rows=rows, row_bytes=row_bytes).slots
    except ConfigError as error:
        raise ConfigError(error.message, _FORMS_OF_ROWS) from None


def size_pool(
    setting: str | int,
    *,
    name: str,
    rows: int,
    row_bytes: int,
    reserve: int = 2 << 30,
    available: int | None = None,
) -> Sizing:
    """The slots that a size setting asks for; never more than there are rows.

    Args:
        setting: "25%" (of the rows, rounded up), "12GiB" (also KB … TB, KiB … TiB), a number of
            slots, or "auto": all rows if they fit into available memory less the reserve,
            otherwise as many as fit.
        name: of the setting, for messages.
        rows: rows that could want a slot. row_bytes: size of a slot.
        reserve: bytes that "auto" leaves to everything else.
        available: bytes of free memory; default: what the operating system reports.

    Raises ConfigError naming the setting. Whether the pool is large enough to work is not checked
    here but where it is made.
    """
    text = str(setting).strip()
    if text == "auto":
        free = psutil.virtual_memory().available if available is None else available
        slots = fit_rows(rows, row_bytes, free - reserve)
        why = (
            f"{byte_size(free)} of memory are available and {byte_size(reserve)} stay in "
            "reserve, so " + ("all fit" if slots == rows else f"{slots} of {rows} fit")
        )
    elif match := re.fullmatch(r"(\d+(?:\.\d*)?)\s*%", text):
        percent = float(match[1])
        if percent > 100:
            raise ConfigError(f"{name} {text!r} is more than all rows.", _FORMS)
        slots = math.ceil(rows * percent / 100)
        why = f"{text} of {rows}"
    elif re.fullmatch(r"\d+", text):
        slots = min(rows, int(text))
        why = f"{text} slots were asked for, and there are {rows} rows"
    elif (nbytes := size_bytes(text)) is not None:
        slots = fit_rows(rows, row_bytes, nbytes)
        why = f"{text} hold {slots} of {rows} rows"
    else:
        raise ConfigError(f"{name} {text!r} is not a size.", _FORMS)
    total = f"{slots} slots of {byte_size(row_bytes)}, {byte_size(slots * row_bytes)} in all"
    return Sizing(slots, f"{name}: {total} ({why}).")
