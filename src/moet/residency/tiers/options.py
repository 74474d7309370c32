"""How large the tiers are and how they are managed; what cannot work is refused here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moet.errors import ConfigError
from moet.formats.layout import Precision


@dataclass(frozen=True)
class TierSizes:
    """Rows of one precision that have room: `slots` in GPU memory, `places` in the arena."""

    slots: int
    places: int


@dataclass(frozen=True)
class TierOptions:
    """
    Args:
        policy: a name in `POLICIES`. half_life: steps in which heat halves.
        margin: by how much a row's priority must exceed that of the row whose slot it takes (LFU:
            log2 of the heat; LRU: steps), so that two rows of like heat do not change places.
        plan_every: steps between two decisions about which rows move.
        max_moves: rows of one precision on the way from one tier to another at a time; a row is on
            its way until its old place is free again.
        streaming: arena places that decode's hot rows do not fill, for rows that pass through (a
            prompt's, above all); None: what a layer can need at once, at most half the arena.
        io_threads: rows read from disk at once.
        layer_rows: the most rows of a layer that a step can use (top-k × tokens in a step); None:
            all of them.
    """

    policy: str = "lfu"
    half_life: float = 64
    margin: float = 0.25
    plan_every: int = 16
    max_moves: int = 16
    streaming: int | None = None
    io_threads: int = 4
    layer_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("plan_every", "max_moves", "io_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")


@dataclass(frozen=True)
class Limits:
    """What follows from the sizes. moves, streaming: as in TierOptions, made to fit."""

    moves: int
    streaming: int


def needed_rows(owned: NDArray[np.bool_], options: TierOptions) -> int:
    """The most rows of a layer that a step can use. owned: bool [layers, experts]."""
    needed = int(owned.sum(axis=1).max(initial=0))
    return needed if options.layer_rows is None else min(needed, options.layer_rows)


def least_places(owned: NDArray[np.bool_], slots: int, options: TierOptions) -> int:
    """The smallest arena that works beside `slots` GPU slots (`check_sizes` has the reason)."""
    if slots >= owned.sum():
        return 2
    return max(2, needed_rows(owned, options) + 2 - slots)


def check_sizes(
    precision: Precision,
    owned: NDArray[np.bool_],
    sizes: TierSizes,
    row_bytes: int,
    options: TierOptions,
) -> Limits:
    """Whether every step can be served whatever is resident when it comes.

    A step uses at most `needed` rows of a layer. Those it found in memory hold a place each, and
    up to `moves` of them a second one that is not free yet. The missing ones need a place each;
    they reach a GPU slot through the arena, where one place is kept free for that (so that an arena
    of one place could not be loaded while steps run).

    Args:
        owned: which rows are of this precision, bool [layers, experts].

    Raises ConfigError saying how large the arena must be.
    """
    rows, needed = int(owned.sum()), needed_rows(owned, options)
    least = least_places(owned, sizes.slots, options)
    if sizes.places < least:
        raise ConfigError(
            f"an arena of {sizes.places} {precision} rows is too small beside {sizes.slots} GPU "
            f"slots: a step can use {needed} rows of a layer at once.",
            f"Make the arena at least {least} rows ({least * row_bytes / 2**30:.3g} GiB), or serve "
            f"fewer tokens in a step.",
        )
    beyond = sizes.slots + sizes.places - needed - 1
    moves = max(1, min(options.max_moves, sizes.places // 4, beyond))
    wanted = needed if options.streaming is None else options.streaming
    if sizes.slots + sizes.places - moves > rows:  # nothing needs to pass through
        wanted = 0
    streaming = min(sizes.places, max(1 + moves, min(wanted, sizes.places // 2)))
    return Limits(moves, streaming)
