"""What the confidence gate costs on a GPU, and what it wins.

    PYTHONPATH=src:. python -m benchmarks.gate_gpu MODEL --pack PACK --level N --name NAME

One engine of vLLM with CUDA graphs and all rows in GPU memory; τ is changed between the settings
(1 is FP4, 0 the base; at 0.01 hardly any token is in doubt). The settings with a second pass are
measured twice, with its CUDA graphs and without, where it is launched piece by piece. Of each:

* the KL of the next token's distribution to FP4's, over the whole vocabulary, at the ends of the
  windows of models/nano-moe; top-1 agreement; the share of tokens that the gate decided again;
* by streams, tokens a second of decoding alone, after several groups of prompts: two runs of
  different length, subtracted, of each the shortest of three, for which all settings take turns,
  since what else the machine does can only slow them; the share of tokens decided again; what a
  second pass took, likewise.

Writes bench/results/gate-NAME.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams, TokensPrompt

from moet.bench.results import Row, write_result
from moet.eval.heldout import read_heldout
from moet.vllm.worker import MoetWorkerExtension

SETTINGS = {
    "fp4": 1.0,
    "base": 0.0,
    "tau-0.01": 0.01,
    "tau-0.4": 0.4,
    "tau-0.6": 0.6,
    "tau-0.8": 0.8,
}
STREAMS = {1: 4, 16: 2}  # groups of so many prompts, how many groups
PROMPT, SHORT, LONG = 64, 8, 104  # tokens
REPEATS = 3

Counts = dict[str, float]


class GateBenchmarkExtension(MoetWorkerExtension):
    """In the worker's process."""

    model_runner: Any

    def moet_second_pass_by_graph(self, by_graph: bool) -> None:
        self.model_runner.moet_second.graphs._graphs_captured = by_graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--level", type=int, required=True)
    parser.add_argument("--name", required=True, help="of the result file")
    options = parser.parse_args()
    windows = read_heldout(Path("models/nano-moe")).tokens
    ids = windows[..., :-1].reshape(-1, windows.shape[-1] - 1).tolist()
    rows = measure(boot(options.model, options.pack), ids, options)
    gpu = {"gpu": torch.cuda.get_device_name()}
    write_result(Path(f"bench/results/gate-{options.name}.json"), rows, gpu)


def boot(model: Path, pack: Path) -> LLM:
    sizes = dict.fromkeys(("base_pool", "fp4_pool", "arena"), "100%")
    return LLM(
        model=str(model),
        quantization="moet",
        additional_config={"moet": {"pack": str(pack), "gate": {}, **sizes}},
        worker_extension_cls="benchmarks.gate_gpu.GateBenchmarkExtension",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max(STREAMS),
        max_logprobs=-1,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=256 << 20,
        seed=0,
    )


def measure(llm: LLM, ids: list[list[int]], options: argparse.Namespace) -> list[Row]:
    cases = [
        (setting, tau, "graph" if 0 < tau < 1 else "none") for setting, tau in SETTINGS.items()
    ]
    cases += [(setting, tau, "pieces") for setting, tau in SETTINGS.items() if 0.1 < tau < 1]
    fp4: np.ndarray | None = None
    rows: list[Row] = []
    for setting, tau, second_pass in cases:
        choose(llm, tau, second_pass)
        before = counts(llm)
        logprobs = distributions(llm, ids)
        now = counts(llm)
        fp4 = logprobs if fp4 is None else fp4
        kl = (np.exp(fp4) * (fp4 - logprobs)).sum(-1)
        row: Row = {
            "model": options.model.name,
            "setting": setting,
            "level": options.level,
            "tau": tau,
            "second_pass": second_pass,
            "positions": len(kl),
            "kl": float(kl.mean()),
            "kl_se": float(kl.std(ddof=1) / np.sqrt(len(kl))),
            "top1": float((fp4.argmax(-1) == logprobs.argmax(-1)).mean()),
            "fired": share([{name: now[name] - before[name] for name in now}], "fired", "tokens"),
        }
        rows.append(row)
    for streams in STREAMS:
        measure_speed(llm, ids, streams, cases, rows)
    rows = [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in rows]
    for row in rows:
        print(row, flush=True)
    return rows


def measure_speed(
    llm: LLM,
    ids: list[list[int]],
    streams: int,
    cases: list[tuple[str, float, str]],
    rows: list[Row],
) -> None:
    """Adds to each case's row what it does while so many of these prompts are continued at once."""
    groups = range(STREAMS[streams])
    runs: dict[tuple[int, int], list[tuple[float, float, Counts]]] = {}
    for _ in range(REPEATS):
        for group in groups:
            chosen = ids[group * streams :][:streams]
            for case, (_, tau, second_pass) in enumerate(cases):
                choose(llm, tau, second_pass)
                before = counts(llm)
                short, long = (decode(llm, chosen, tokens) for tokens in (SHORT, LONG))
                now = counts(llm)
                spent = {name: now[name] - before[name] for name in now}
                runs.setdefault((case, group), []).append((short, long, spent))
    for case, row in enumerate(rows):
        of = [runs[case, group] for group in groups]
        seconds = sum(min(run[1] for run in r) - min(run[0] for run in r) for r in of)
        row[f"tok_s_{streams}"] = len(of) * streams * (LONG - SHORT) / seconds
        row[f"fired_{streams}"] = share([run[2] for r in of for run in r], "fired", "tokens")
        for name, part, whole in (
            ("gated", "second_passes", "steps"),
            ("replayed", "replays", "second_passes"),
        ):
            row[f"{name}_{streams}"] = share([run[2] for r in of for run in r], part, whole)
        fastest = [min((run[2] for run in r), key=lambda spent: spent["seconds"]) for r in of]
        row[f"second_pass_ms_{streams}"] = 1e3 * share(fastest, "seconds", "second_passes")


def choose(llm: LLM, tau: float, second_pass: str) -> None:
    """The setting that the next requests are answered with."""
    llm.collective_rpc("moet_gate", args=(tau, 1.0))
    llm.collective_rpc("moet_second_pass_by_graph", args=(second_pass != "pieces",))


def share(spent: list[Counts], part: str, whole: str) -> float:
    """One of the gate's counts by another."""
    return sum(of[part] for of in spent) / max(1, sum(of[whole] for of in spent))


def counts(llm: LLM) -> Counts:
    """What the gate has counted so far."""
    (stats,) = llm.collective_rpc("moet_stats")
    return {of["name"].removeprefix("gate_"): of["value"] for of in stats["further"]}


def distributions(llm: LLM, ids: list[list[int]]) -> np.ndarray:
    """The log-probability of every next token: float64 [prompts, vocabulary]."""
    parameters = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, detokenize=False)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in ids], parameters)
    found = []
    for output in outputs:
        (row,) = output.outputs[0].logprobs
        logprobs = np.full(len(row), -np.inf)
        for token, of in row.items():
            logprobs[token] = of.logprob
        found.append(logprobs)
    return np.array(found)


def decode(llm: LLM, ids: list[list[int]], tokens: int) -> float:
    """Seconds that it takes to continue all of these prompts at once."""
    prompts = [TokensPrompt(prompt_token_ids=p[:PROMPT]) for p in ids]
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    llm.generate(prompts, parameters, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
