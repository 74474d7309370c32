"""What the confidence gate costs on a GPU, and what it wins.

    PYTHONPATH=src:. python -m benchmarks.gate_gpu MODEL --pack PACK --level N --name NAME

One engine of vLLM with CUDA graphs and all rows in GPU memory; τ is changed between the settings
(1 is FP4, 0 the base). Of every setting:

* the KL of the next token's distribution to FP4's, over the whole vocabulary, at the ends of the
  windows of models/nano-moe; top-1 agreement; the share of tokens that the gate decided again;
* tokens a second of decoding alone, by streams: two runs of different length, subtracted; the
  median of three.

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

SETTINGS = {"fp4": 1.0, "base": 0.0, "tau-0.4": 0.4, "tau-0.6": 0.6, "tau-0.8": 0.8}
STREAMS = (1, 16)
PROMPT, SHORT, LONG = 64, 8, 136  # tokens

Counts = tuple[float, ...]


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
        worker_extension_cls="moet.vllm.worker.MoetWorkerExtension",
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
    for setting, tau in SETTINGS.items():
        llm.collective_rpc("moet_gate", args=(tau, 1.0))
        before = counts(llm)
        logprobs = distributions(llm, ids)
        now = counts(llm)
        fp4 = logprobs if fp4 is None else fp4
        kl = (np.exp(fp4) * (fp4 - logprobs)).sum(-1)
        speeds = {f"tok_s_{n}": speed(llm, ids[:n]) for n in STREAMS}
        after = counts(llm)
        rows.append(
            {
                "model": options.model.name,
                "setting": setting,
                "level": options.level,
                "tau": tau,
                "positions": len(kl),
                "kl": float(kl.mean()),
                "kl_se": float(kl.std(ddof=1) / np.sqrt(len(kl))),
                "top1": float((fp4.argmax(-1) == logprobs.argmax(-1)).mean()),
                "fired": share(before, now),
                "fired_decoding": share(now, after),
                "second_pass_ms": 1e3 * (after[2] - now[2]) / max(1, after[3] - now[3]),
                **speeds,
            }
        )
        print(rows[-1], flush=True)
    return rows


def share(before: Counts, after: Counts) -> float:
    """Of the tokens that the gate has looked at meanwhile, those that fired."""
    return (after[1] - before[1]) / max(1, after[0] - before[0])


def counts(llm: LLM) -> Counts:
    """Tokens that the gate has looked at, those that fired, and second passes: seconds, number."""
    (stats,) = llm.collective_rpc("moet_stats")
    of: dict[str, Any] = {figure["name"]: figure["value"] for figure in stats["further"]}
    names = ("gate_tokens", "gate_fired", "gate_seconds", "gate_second_passes")
    return tuple(of[name] for name in names)


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
