"""Whether guessing the next layer's experts would make a step faster.

    python benchmarks/prediction.py MODEL [MODEL …] --tokens DIR

The guess: the next layer's router, applied one layer early, to the residual with the next layer's
norm ("residual") or to what the layer's own experts are given ("input"). Counted on held-out tokens
(DIR/validation.bin) are rows that are not in GPU memory: which of those that a step uses the guess
names, and which it names in vain. In GPU memory are each layer's hottest experts, by other tokens
(DIR/calibration.bin; both uint16).

Then what that is worth in a step at DeepSeek-V4-Flash's geometry, by the figures of
bench/results/residency-h200.json and kernels-h200.json. Writes bench/results/prediction.json.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moet.bench.results import Row, read_result, write_result
from moet.checkpoints import Checkpoint
from moet.eval.reference import load_reference

RESULTS = Path("bench/results")
WINDOWS, LENGTH = 32, 256  # tokens that are looked at
HOT = (19, 50)  # % of a layer's experts
STREAMS = (1, 8, 32)
SOURCES = ("residual", "input")
GUESSES = (1, 2)  # times top-k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--tokens", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    counted = [row for path in options.model for row in count(path, options.tokens)]
    residency = read_result(RESULTS / "residency-h200.json")
    kernels = read_result(RESULTS / "kernels-h200.json")
    rows = [*counted, *worth(counted, residency, kernels)]
    write_result(RESULTS / "prediction.json", rows)


class Router:
    """The choice of one layer of a DeepSeek-V3: sigmoid scores, a bias, groups."""

    def __init__(self, layer: Any, config: Any) -> None:
        self._gate, self._config = layer.mlp.gate, config
        self.norm: nn.Module = layer.post_attention_layernorm

    def choose(self, x: Tensor, count: int) -> Tensor:
        """The `count` experts of highest score: int64 [T, count]."""
        gate, config = self._gate, self._config
        scores = nn.functional.linear(x, gate.weight).sigmoid() + gate.e_score_correction_bias
        groups = scores.unflatten(-1, (config.n_group, -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(config.topk_group, -1)[1]
        open_ = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter_(-1, best, True)
        closed = ~open_.unsqueeze(-1).expand_as(groups).flatten(-2)
        return scores.masked_fill(closed, -9).topk(count, -1)[1]


def count(path: Path, tokens: Path) -> Iterator[Row]:
    """A row for each share of hot experts and number of streams.

    residual, input: `score` of guesses of top-k, then of twice as many experts, mean over layers.
    layers: those of "residual", by layer.
    """
    with Checkpoint.open(path) as checkpoint:
        model: Any = load_reference(checkpoint, checkpoint.decode_expert)
    layers = [layer for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    routers = [Router(layer, model.config) for layer in layers]
    top_k, experts = model.config.num_experts_per_tok, model.config.n_routed_experts
    residuals = run(model, layers, windows(tokens / "calibration.bin"))
    chosen = [r.choose(r.norm(x), top_k) for r, x in zip(routers, residuals, strict=True)]
    heat = [np.bincount(of.reshape(-1).numpy(), minlength=experts) for of in chosen]
    residuals = run(model, layers, windows(tokens / "validation.bin"))
    for percent in HOT:
        slots = round(experts * percent / 100)
        for streams in STREAMS:
            remote: list[float] = []
            found: dict[str, list[list[float]]] = {source: [] for source in SOURCES}
            for i in range(1, len(layers)):
                cold = np.ones(experts, np.bool_)
                cold[np.argsort(-heat[i], kind="stable")[:slots]] = False
                before, router = residuals[i - 1], routers[i]
                used = steps(router.choose(router.norm(residuals[i]), top_k), experts, streams)
                remote.append(float((used & cold).sum(1).mean()))
                given = {"residual": router.norm(before), "input": routers[i - 1].norm(before)}
                for source, x in given.items():
                    guesses = [
                        steps(router.choose(x, times * top_k), experts, streams) & cold
                        for times in GUESSES
                    ]
                    found[source].append(
                        [v for guess in guesses for v in score(guess, used & cold)]
                    )
            yield {
                "model": path.name,
                "hot": percent,
                "streams": streams,
                "remote": np.mean(remote).round(2).item(),
                **{source: np.mean(found[source], 0).round(2).tolist() for source in SOURCES},
                **({"layers": np.round(found["residual"], 2).tolist()} if streams == 1 else {}),
            }


def score(guess: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> list[float]:
    """Of the remote rows that steps use, the share that is named; and rows that are named in vain,
    for each that steps use."""
    hits, uses = int((guess & wanted).sum()), int(wanted.sum())
    return [hits / uses, int((guess & ~wanted).sum()) / uses]


def steps(chosen: Tensor, experts: int, streams: int) -> NDArray[np.bool_]:
    """Which experts each step uses, bool [steps, experts]: so many windows' tokens side by side."""
    mask = torch.zeros(*chosen.shape[:2], experts, dtype=torch.bool).scatter_(-1, chosen, True)
    turns = mask.unflatten(0, (WINDOWS // streams, streams)).any(1)
    return turns.flatten(0, 1).numpy()


def windows(path: Path) -> NDArray[np.int64]:
    """Evenly spaced over the file, [WINDOWS, LENGTH]; kinds of text that follow each other there
    take turns."""
    stream = np.fromfile(path, np.uint16).astype(np.int64)
    starts = np.linspace(0, len(stream) - LENGTH - 1, WINDOWS).astype(np.int64)
    return np.stack([stream[start : start + LENGTH] for start in starts.reshape(4, -1).T.flat])


@torch.no_grad()
def run(model: Any, layers: Sequence[Any], tokens: NDArray[np.int64]) -> list[Tensor]:
    """What the norm before each layer's experts is given: [WINDOWS, LENGTH, hidden] a layer."""
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _, given, into=into: into.append(given[0])
        )
        for layer, into in zip(layers, seen, strict=True)
    ]
    for window in torch.from_numpy(tokens):
        model(window[None])
    for hook in hooks:
        hook.remove()
    return [torch.cat(of) for of in seen]


def worth(counted: Sequence[Row], residency: Row, kernels: Row) -> Iterator[Row]:
    """What the residual's guess of top-k experts is worth, a row a case: means over models and
    layers, of one stream, since several use nearly all of a small model's experts.

    Rows are copied in the time between two layers' experts (the decode kernel fills the GPU), so
    that a layer saves at most that time. at_best: as if no copy were in vain and none cost
    anything. expected: copies in vain take their part of that time; those of rows on disk take the
    disk's, which is never idle. Remote rows fall on a case's layers by chance (Poisson).
    """
    about = residency["environment"]
    link, disk = about["host_to_device_gbps"], about["disk_gbps"]
    measured = {
        (row["case"], row["streams"]): row
        for row in residency["rows"]
        if row["op"] == "decode" and row["layers"] == 43
    }
    kernel = [
        (row["experts_read"], row["us"])
        for row in kernels["rows"]
        if (row["op"], row["model"], row["precision"], row["activations"])
        == ("decode", "DeepSeek-V4-Flash", "base", "bf16")
    ]
    for (case, streams), row in measured.items():
        if case not in ("hbm50", "hbm19", "hbm19-arena25"):
            continue
        hbm = measured["all-hbm", streams]
        layers = hbm["layers"]
        mb = about["row_bytes"] / 1e6
        experts = float(np.interp(hbm["gpu_mb"] / layers / mb, *zip(*kernel, strict=True)))
        gap = hbm["ms"] * 1e3 / layers - experts  # µs
        hot = 50 if case == "hbm50" else 19
        like = [of for of in counted if (of["hot"], of["streams"]) == (hot, 1)]
        recall, vain = (float(np.mean([of["residual"][i] for of in like])) for i in (0, 1))
        row_us, rows = mb / link * 1e3, row["arena_mb"] / mb / layers
        best = layers * hidden(rows * recall, row_us, gap)
        expected = layers * hidden(rows * (recall + vain), row_us, gap) * recall / (recall + vain)
        if row["disk_mb"]:
            from_disk, read_us = row["disk_mb"] / mb, mb / disk * 1e3
            best += from_disk * recall * gap
            expected += from_disk * (recall * gap - vain * read_us)
        yield {
            "case": case,
            "streams": streams,
            "ms": row["ms"],
            "remote": row["remote_rows_per_step"],
            "gap_us": round(gap),
            "at_best": round(row["ms"] / (row["ms"] - best / 1e3), 3),
            "expected": round(row["ms"] / (row["ms"] - expected / 1e3), 3),
        }


def hidden(rows: float, row_us: float, gap: float) -> float:
    """Mean of min(copies · row_us, gap), with `rows` copies on average."""
    chances = [math.exp(-rows) * rows**n / math.factorial(n) for n in range(60)]
    return sum(chance * min(n * row_us, gap) for n, chance in enumerate(chances))


if __name__ == "__main__":
    main()
