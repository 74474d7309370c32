"""The confidence gate and static maps, measured through the served endpoint.

    python benchmarks/gate.py MODEL --pack PACK --level N --evals DIR --work DIR [--map P=FILE ...]

Starts `moet serve` once with the gate, whose threshold it changes by `POST /v1/moet/gate` (1 or
more is FP4, 0 the base), and once for each map. Of every setting it measures:

* the KL of the next token's distribution to FP4's, over the whole vocabulary, behind prompts that
  are the windows of models/nano-moe cut at evenly spaced positions; top-1 agreement; the share of
  tokens that the gate decided again;
* tokens a second of eight requests that run together;
* with `--evals`: tasks with exact answers (`tasks.jsonl`) and the last words of passages
  (`last_word.jsonl`), greedily, and McNemar's exact test against FP4 and against the base.

Finished settings in DIR are kept, so a run that stops goes on. Writes bench/results/gate-NAME.json
when all are there. A quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from moet.bench.results import Row, write_result
from moet.cli.server import Server
from moet.eval.heldout import read_heldout

TAUS = (0.4, 0.6, 0.8)
CONCURRENT = 16
# float32: what is measured is precision of experts, not the arithmetic around them.
ENGINE = ["--dtype", "float32", "--attention-backend", "CPU_MLA", "--kv-cache-memory-bytes",
          str(256 << 20), "--max-model-len", "1024", "--max-num-seqs", str(CONCURRENT),
          "--max-logprobs", "-1", "--enforce-eager"]  # fmt: skip


@dataclass
class Item:
    """A question: prompt (text or token ids), and the text that the answer begins with."""

    prompt: Any
    answer: str = ""


@dataclass
class Measured:
    """One setting's answers. logprobs: float32 [positions, vocabulary]."""

    logprobs: np.ndarray
    fired: float
    tokens_per_second: float
    right: dict[str, np.ndarray] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--name", required=True, help="the model's, in the result file")
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--level", type=int, required=True)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--windows", type=Path, default=Path("models/nano-moe"), metavar="DIR")
    parser.add_argument("--positions", type=int, default=4, help="of each window")
    parser.add_argument("--evals", type=Path, metavar="DIR")
    parser.add_argument("--items", type=int, default=400, help="of each file in --evals")
    parser.add_argument("--answers-tau", type=float, default=0.6)
    parser.add_argument("--answers-map", type=int, default=20, metavar="PERCENT")
    parser.add_argument("--map", action="append", default=[], metavar="PERCENT=FILE")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    found = bench.run()
    rows = list(fidelity_rows(found, options)) + list(answer_rows(found, options))
    write_result(Path(f"bench/results/gate-{options.name}.json"), rows)


class Bench:
    """What is asked, and of which server."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        config = json.loads((options.model / "config.json").read_text())
        self.vocabulary = config["vocab_size"]
        heldout = read_heldout(options.windows).tokens
        length = heldout.shape[-1] - 1
        cuts = [length * (i + 1) // options.positions for i in range(options.positions)]
        self.prefixes = [
            Item(window[:cut].tolist()) for segment in heldout for window in segment for cut in cuts
        ]
        self.evals = {}
        if options.evals:
            for name in ("tasks", "last_word"):
                lines = (options.evals / f"{name}.jsonl").read_text().splitlines()
                items = [json.loads(line) for line in lines[: options.items]]
                self.evals[name] = [Item(item["p"], item["a"]) for item in items]

    def run(self) -> dict[str, Measured]:
        """By setting: fp4, base, tau-T, map-P."""
        taus = {"fp4": 1.0, "base": 0.0, **{f"tau-{tau}": tau for tau in TAUS}}
        maps = dict(text.split("=", 1) for text in self.options.map)
        answered = {"fp4", "base", f"tau-{self.options.answers_tau}"}
        answered.add(f"map-{self.options.answers_map}")
        if not all(self.file(key).exists() for key in taus):
            with self.serve("--set", 'gate={"tau": 0}') as server:
                for key, tau in taus.items():
                    answer = httpx.post(f"{server.url}/v1/moet/gate", json={"tau": tau}, timeout=60)
                    answer.raise_for_status()
                    self.keep(key, server, key in answered)
        for percent, path in maps.items():
            key = f"map-{percent}"
            if not self.file(key).exists():
                with self.serve("--precision", path) as server:
                    self.keep(key, server, key in answered)
        return {key: self.load(key) for key in (*taus, *(f"map-{percent}" for percent in maps))}

    def file(self, key: str) -> Path:
        """Where a setting's measurement is kept."""
        return self.options.work / f"{key}.npz"

    def keep(self, key: str, server: Server, answers: bool) -> None:
        """Measures a setting, unless that was done."""
        if self.file(key).exists():
            return
        of = asyncio.run(self.measure(server, answers))
        right = {f"right-{name}": values for name, values in of.right.items()}
        scalars = {"fired": of.fired, "tokens_per_second": of.tokens_per_second}
        np.savez(self.file(key), logprobs=of.logprobs, **scalars, **right)
        print(f"{key} {scalars}, right { ({k: v.mean() for k, v in right.items()}) }", flush=True)

    def load(self, key: str) -> Measured:
        with np.load(self.file(key)) as kept:
            right = {n.removeprefix("right-"): kept[n] for n in kept if n.startswith("right-")}
            return Measured(
                kept["logprobs"], float(kept["fired"]), float(kept["tokens_per_second"]), right
            )

    def serve(self, *arguments: str) -> Server:
        options = self.options
        log = options.work / f"serve-{time.monotonic_ns()}.log"
        command = [str(options.model), "--pack", str(options.pack), *arguments, *ENGINE]
        return Server(command, log, dict(os.environ))

    async def measure(self, server: Server, answers: bool) -> Measured:
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            ask = Asker(client, name)
            before = await gate_counts(client)
            prefixes = await ask.all(self.prefixes, max_tokens=1, logprobs=self.vocabulary)
            after = await gate_counts(client)
            asked, fired = (b - a for a, b in zip(before, after, strict=True))
            measured = Measured(
                np.stack([self.distribution(choice) for choice in prefixes]),
                fired / asked if asked else 0.0,
                await speed(ask, self.prefixes),
            )
            for key, items in self.evals.items() if answers else ():
                longest = max(len(item.answer) for item in items)
                choices = await ask.all(items, max_tokens=longest // 2 + 2)
                measured.right[key] = np.array(
                    [c["text"].startswith(i.answer) for c, i in zip(choices, items, strict=True)]
                )
        return measured

    def distribution(self, choice: dict[str, Any]) -> np.ndarray:
        """The log-probability of every token: [vocabulary]."""
        (top,) = choice["logprobs"]["top_logprobs"]
        logprobs = np.full(self.vocabulary, -np.inf, np.float32)
        for token, value in top.items():
            logprobs[int(token.removeprefix("token_id:"))] = value
        assert np.isfinite(logprobs).all(), "not the whole vocabulary"
        return logprobs


@dataclass
class Asker:
    """Sends completion requests, sixteen at a time."""

    client: httpx.AsyncClient
    model: str

    async def all(self, items: list[Item], **parameters: Any) -> list[dict[str, Any]]:
        """The first choice of each answer, in order."""
        limit = asyncio.Semaphore(CONCURRENT)

        async def one(item: Item) -> dict[str, Any]:
            body = {"model": self.model, "prompt": item.prompt, "temperature": 0, **parameters}
            body["return_tokens_as_token_ids"] = "logprobs" in parameters
            async with limit:
                answer = await self.client.post("/v1/completions", json=body)
            answer.raise_for_status()
            choice: dict[str, Any] = answer.json()["choices"][0]
            return choice

        return await asyncio.gather(*map(one, items))


async def gate_counts(client: httpx.AsyncClient) -> tuple[float, float]:
    """Tokens that the gate has looked at, and those that fired; 0 without a gate."""
    (rank,) = (await client.get("/v1/moet/stats")).json()["ranks"]
    counts = {figure["name"]: figure["value"] for figure in rank["further"]}
    return counts.get("gate_tokens", 0), counts.get("gate_fired", 0)


async def speed(ask: Asker, prefixes: list[Item], requests: int = 8, tokens: int = 64) -> float:
    """Tokens a second of `requests` that run together, prompts of a quarter window included."""
    items = prefixes[:: len(prefixes) // requests][:requests]
    start = time.perf_counter()
    await ask.all(items, max_tokens=tokens, ignore_eos=True)
    return requests * tokens / (time.perf_counter() - start)


def divergence(fp4: Measured, other: Measured) -> tuple[np.ndarray, np.ndarray]:
    """KL to FP4 in nats, and whether the most likely token is the same: [positions] each."""
    p = fp4.logprobs.astype(np.float64)
    kl = (np.exp(p) * (p - other.logprobs)).sum(-1)
    return kl, p.argmax(-1) == other.logprobs.argmax(-1)


def fidelity_rows(found: dict[str, Measured], options: argparse.Namespace) -> Iterator[Row]:
    base, _ = divergence(found["fp4"], found["base"])
    for key, of in found.items():
        kl, agree = divergence(found["fp4"], of)
        kind, _, value = key.partition("-")
        root = math.sqrt(len(kl))
        yield {
            "model": options.name,
            "setting": key,
            "level": options.level,
            "map_percent": float(value) if kind == "map" else 100 if key == "fp4" else 0,
            "tau": float(value) if kind == "tau" else 0,
            "positions": len(kl),
            "kl": float(kl.mean()),
            "kl_se": float(kl.std(ddof=1) / root),
            "kl_change": float((kl - base).mean()),
            "kl_change_se": float((kl - base).std(ddof=1) / root),
            "top1": float(agree.mean()),
            "fired": of.fired,
            # FP4 is the gate that always fires here, at the price of two passes.
            "tokens_per_second": None if key == "fp4" else of.tokens_per_second,
        }


def answer_rows(found: dict[str, Measured], options: argparse.Namespace) -> Iterator[Row]:
    for key, of in found.items():
        for task, right in of.right.items():
            row: Row = {
                "model": options.name,
                "setting": key,
                "task": task,
                "items": len(right),
                "right": float(right.mean()),
            }
            for other in ("fp4", "base"):
                theirs = found[other].right[task]
                gained, lost = int((right & ~theirs).sum()), int((theirs & ~right).sum())
                row |= {
                    f"gained_on_{other}": gained,
                    f"lost_to_{other}": lost,
                    f"p_{other}": mcnemar(gained, lost),
                }
            yield row


def mcnemar(gained: int, lost: int) -> float:
    """McNemar's exact two-sided test: the p-value of so uneven a split of the differing pairs."""
    n = gained + lost
    tail = sum(math.comb(n, k) for k in range(min(gained, lost) + 1)) / 2**n
    return min(1.0, 2 * tail)


if __name__ == "__main__":
    main()
