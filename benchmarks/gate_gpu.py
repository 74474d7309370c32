"""What the confidence gate costs on a GPU, and what it wins.

    PYTHONPATH=src:. python -m benchmarks.gate_gpu MODEL --pack PACK --level N --name NAME

One engine of vLLM with CUDA graphs and all rows in GPU memory; τ is changed between the settings
(1 is FP4, 0 the base; at 0.01 hardly any token is in doubt). At last the second pass's graphs are
given up, and the settings with many are measured once more, launched piece by piece. Of each:

* the KL of the next token's distribution to FP4's, over the whole vocabulary, at the ends of the
  windows of models/nano-moe; top-1 agreement; the share of tokens that the gate decided again;
* by streams, tokens a second of decoding alone: two runs of different length, subtracted; the
  median of three; meanwhile, the share of tokens decided again, of steps with a second pass, and
  what a second pass took.

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
STREAMS = (1, 16)
PROMPT, SHORT, LONG = 64, 8, 136  # tokens

Counts = dict[str, float]


class GateBenchmarkExtension(MoetWorkerExtension):
    """In the worker's process."""

    model_runner: Any

    def moet_release_second_pass(self) -> None:
        self.model_runner.moet_second.graphs.release_graphs()


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
    fp4: np.ndarray | None = None
    rows: list[Row] = []
    doubts = {setting: tau for setting, tau in SETTINGS.items() if 0.1 < tau < 1}
    for by, settings in (("graph", SETTINGS), ("pieces", doubts)):
        if by == "pieces":
            llm.collective_rpc("moet_release_second_pass")
        for setting, tau in settings.items():
            llm.collective_rpc("moet_gate", args=(tau, 1.0))
            before = counts(llm)
            logprobs = distributions(llm, ids)
            fp4 = logprobs if fp4 is None else fp4
            kl = (np.exp(fp4) * (fp4 - logprobs)).sum(-1)
            row: Row = {
                "model": options.model.name,
                "setting": setting,
                "level": options.level,
                "tau": tau,
                "second_pass": by if 0 < tau < 1 else "none",
                "positions": len(kl),
                "kl": float(kl.mean()),
                "kl_se": float(kl.std(ddof=1) / np.sqrt(len(kl))),
                "top1": float((fp4.argmax(-1) == logprobs.argmax(-1)).mean()),
                "fired": share(before, counts(llm), "fired", "tokens"),
            }
            for streams in STREAMS:
                before = counts(llm)
                row[f"tok_s_{streams}"] = speed(llm, ids[:streams])
                now = counts(llm)
                row[f"fired_{streams}"] = share(before, now, "fired", "tokens")
                row[f"gated_{streams}"] = share(before, now, "second_passes", "steps")
                row[f"replayed_{streams}"] = share(before, now, "replays", "second_passes")
                ms = 1e3 * share(before, now, "seconds", "second_passes")
                row[f"second_pass_ms_{streams}"] = ms
            rows.append({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})
            print(rows[-1], flush=True)
    return rows


def share(before: Counts, after: Counts, part: str, whole: str) -> float:
    """How much one of the gate's counts has grown meanwhile, by the growth of another."""
    return (after[part] - before[part]) / max(1, after[whole] - before[whole])


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


def speed(llm: LLM, ids: list[list[int]]) -> float:
    """Tokens a second of decoding after each of these prompts at once."""
    prompts = [TokensPrompt(prompt_token_ids=p[:PROMPT]) for p in ids]
    found = []
    for _ in range(3):
        seconds = []
        for tokens in (SHORT, LONG):
            parameters = SamplingParams(
                temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            llm.generate(prompts, parameters, use_tqdm=False)
            seconds.append(time.perf_counter() - start)
        found.append(len(ids) * (LONG - SHORT) / (seconds[1] - seconds[0]))
    return float(np.median(found))


if __name__ == "__main__":
    main()
