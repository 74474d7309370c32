"""What a server did under a load: its rows of a result file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from moet.bench.load import Load
from moet.bench.results import Row
from moet.errors import ConfigError

FASTEST = ("gpu", "memory")  # tiers that decoding reads at full speed
_PATHS = ("pack", "heat_file", "routing_trace")  # settings that mean nothing elsewhere


def check_load(load: Load, about: Mapping[str, Any]) -> None:
    """Raises ConfigError for a load that the server would queue or refuse. about: what
    `/v1/moet/about` says."""
    most = about["max_num_seqs"]
    if load.streams > most:
        raise ConfigError(
            f"--streams {load.streams}: this server takes {most} requests at a time.",
            f"Serve with --max-num-seqs {load.streams}, or measure fewer streams.",
        )
    if load.prompt + load.tokens > about["max_model_len"]:
        raise ConfigError(
            f"--prompt {load.prompt} and --tokens {load.tokens} are more than the "
            f"{about['max_model_len']} tokens of a request that this server takes.",
            "Serve with a larger --max-model-len, or measure shorter ones.",
        )


def measured(
    load: Load,
    report: Mapping[str, Any],
    before: Iterable[Mapping[str, Any]],
    after: Iterable[Mapping[str, Any]],
) -> Row:
    """A row of the result file.

    tok_s: streams ÷ ms, the median time of a token after a request's first. first_ms: median time
    to that one. output_tok_s: of the whole run, prompts included. expert_gbps: bytes of expert rows
    that a decode step reads, all ranks together, ÷ ms; hit_rate: the share of these rows found in
    the fastest tier; remote_rows: of a step, the others. waited_ms: of a step, for the disk. Those
    of steps are means, of the warm-up's steps too.

    Args:
        report: of `load.send`. before, after: each rank's statistics (`/v1/moet/stats`).
    """
    old, new = list(before), list(after)
    rows = {tier: decoded(new, tier, "rows") - decoded(old, tier, "rows") for tier in _tiers(new)}
    nbytes = sum(decoded(new, tier, "bytes") - decoded(old, tier, "bytes") for tier in rows)
    steps = max(1, new[0]["steps"] - old[0]["steps"])
    stalled = new[0]["stall_seconds"] - old[0]["stall_seconds"]
    ms = report["median_tpot_ms"]
    near = sum(count for tier, count in rows.items() if tier in FASTEST)
    total = sum(rows.values())
    return {
        "streams": load.streams, "prompt": load.prompt, "tokens": load.tokens,
        "requests": load.requests * load.streams,
        "tok_s": round(load.streams / ms * 1e3, 2), "ms": round(ms, 3),
        "p99_ms": round(report["p99_itl_ms"], 3), "first_ms": round(report["median_ttft_ms"], 1),
        "output_tok_s": round(report["output_throughput"], 2),
        "expert_gbps": round(nbytes / steps / ms / 1e6, 3),
        "hit_rate": round(near / total, 4) if total else 1.0,
        "remote_rows": round((total - near) / steps, 2),
        "waited_ms": round(stalled / steps * 1e3, 3),
    }  # fmt: skip


def described(about: Mapping[str, Any]) -> dict[str, Any]:
    """What of a server goes into the environment of a result file: no paths of its machine."""
    settings = {
        key: PurePath(value).name if isinstance(value, str) else value
        for key, value in about["settings"].items()
        if key not in _PATHS
    }
    return {
        "model": PurePath(about["model"]).name,
        "revision": about["revision"],
        "rows": about["rows"],
        "settings": settings,
        "tensor_parallel_size": about["tensor_parallel_size"],
    }


def _tiers(ranks: list[Mapping[str, Any]]) -> list[str]:
    return sorted({of["tier"] for rank in ranks for of in rank["rows"]})


def decoded(ranks: Iterable[Mapping[str, Any]], tier: str, what: str) -> int:
    """Of decode's rows that were found in a tier: their "rows" or "bytes", all ranks together."""
    return sum(
        of[what]
        for rank in ranks
        for of in rank["rows"]
        if of["tier"] == tier and of["phase"] == "decode"
    )
