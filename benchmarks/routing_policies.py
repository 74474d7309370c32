"""Which rows real text asks for, and in which tier each policy would have had them.

    python benchmarks/routing_policies.py MODEL [MODEL …] --work DIR

Serves each model with vLLM on the CPU, at FP4, and records its routing (the setting
`routing_trace`) while it continues the held-out windows of models/nano-moe: one request at a time,
then eight side by side. Then the replay of `moet simulate` by policy and size, warm: of the steps,
the first quarter is heat only. So with a made-up routing that is more skewed and never changes.
Writes bench/results/routing-policies.json. Two minutes a model on two cores; finished traces in
DIR are kept.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Nothing that imports numba may be imported here, as vLLM's workers import this script too (see
# moet.vllm.config): it is imported where it is used.
from moet.bench.results import Row, write_result

if TYPE_CHECKING:
    from moet.residency.tiers.simulate import Simulated

STREAMS = (1, 8)
PROMPT, ANSWER, WINDOWS = 64, 96, 4  # tokens, tokens, windows of each kind of text
GPU = (10, 19, 50)  # % of the rows, as the arena
ARENA = 25
HALF_LIVES = (16, 64, 1024)  # steps; of LFU's heat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--windows", type=Path, default=Path("models/nano-moe"), metavar="DIR")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in options.model:
        for streams in STREAMS:
            path = options.work / f"{model.name}-{streams}.safetensors"
            if not path.exists():
                # A process of its own: an engine's workers write their trace when they end.
                run = multiprocessing.get_context("spawn").Process(
                    target=record, args=(model, options.windows, streams, options.work, path)
                )
                run.start()
                run.join()
            rows += list(simulated(model.name, streams, path))
    path = options.work / "made-up.safetensors"
    make_up(path)
    rows += list(simulated("made up", 1, path))
    write_result(Path("bench/results/routing-policies.json"), rows)


def record(model: Path, windows: Path, streams: int, work: Path, path: Path) -> None:
    """Continues the windows' first tokens, `streams` requests at a time."""
    from vllm import LLM, SamplingParams, TokensPrompt

    from moet.checkpoints import Checkpoint
    from moet.eval.heldout import read_heldout
    from moet.pack import write_pack
    from moet.quantize import QUANTIZERS

    pack = work / f"{model.name}.moet"
    if not (pack / "moet.json").exists():
        with Checkpoint.open(model) as checkpoint:
            write_pack(checkpoint, pack, quantizer=QUANTIZERS["data-free"]())
    settings = {"pack": str(pack), "precision": "fp4", "fp4_pool": "100%"}
    llm = LLM(
        model=str(model),
        quantization="moet",
        additional_config={"moet": settings | {"routing_trace": str(path)}},
        dtype="float32",
        attention_backend="CPU_MLA",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=streams,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        seed=0,
    )
    heldout = read_heldout(windows).first(WINDOWS)
    # Kinds of text take turns, as users do.
    prompts = [
        TokensPrompt(prompt_token_ids=window[:PROMPT].tolist())
        for turn in range(WINDOWS)
        for window in heldout.tokens[:, turn]
    ]
    llm.generate(
        prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=ANSWER, ignore_eos=True)
    )
    llm.llm_engine.engine_core.shutdown()


def make_up(path: Path) -> None:
    """A trace of one stream whose routing never changes: 19 % of 256 experts take 96 % of it."""
    import numpy as np

    from moet.plan.routing import popularity
    from moet.residency.metrics import Phase
    from moet.residency.tiers.trace import RoutingTrace

    layers, experts, top_k, steps, spread = 4, 256, 6, 1536, 0.059
    rng = np.random.default_rng(0)
    chances = popularity(experts, 1, spread)
    chances = chances / chances.sum()
    names = [rng.permutation(experts) for _ in range(layers)]
    made = [
        (
            Phase.DECODE,
            [
                (layer, sorted(of[rng.choice(experts, top_k, replace=False, p=chances)].tolist()))
                for layer, of in enumerate(names)
            ],
        )
        for _ in range(steps)
    ]
    RoutingTrace.from_steps(range(layers), experts, 4096, made).save(path)


def simulated(model: str, streams: int, path: Path) -> Iterator[Row]:
    """A row for each size, with every policy."""
    from moet.residency.sizing import size_pool
    from moet.residency.tiers import TierOptions, TierSizes
    from moet.residency.tiers.simulate import simulate
    from moet.residency.tiers.trace import RoutingTrace

    trace = RoutingTrace.load(path)
    count = len(trace.layers) * trace.num_experts
    decode = int((~trace.prefill).sum())
    use = int((~trace.prefill[trace.step]).sum())
    print(f"{model}, {streams} streams: {trace.steps} steps, {use / decode:.1f} rows a decode step")
    warmup = trace.steps // 4
    options = {f"lfu, {n}": TierOptions(policy="lfu", half_life=n) for n in HALF_LIVES}
    # Decisions every 4 steps rather than 16.
    options["lfu, 16, often"] = TierOptions(policy="lfu", half_life=16, plan_every=4)
    options |= {policy: TierOptions(policy=policy) for policy in ("lru", "static")}
    for gpu in GPU:
        slots, places = (
            size_pool(f"{n}%", name="size", rows=count, row_bytes=1).slots for n in (gpu, ARENA)
        )
        sizes = TierSizes(slots, max(places, trace.layer_rows + 2 - slots))
        found = {name: simulate(trace, sizes, of, warmup) for name, of in options.items()}
        yield {
            "model": model,
            "streams": streams,
            "steps": found["lru"].steps,
            "rows_per_step": round(use / decode, 1),
            "gpu_percent": gpu,
            "slots": sizes.slots,
            "places": sizes.places,
            "policies": {name: shares(of) for name, of in found.items()},
        }


def shares(found: Simulated) -> Row:
    """Shares of the rows that decode used, by tier, and what moved, a step."""
    from moet.residency.tiers import Tier

    return {
        "gpu": round(found.share(Tier.GPU), 4),
        "disk": round(found.share(Tier.DISK), 4),
        "moves": round((found.promotions + found.demotions) / found.steps, 3),
    }


if __name__ == "__main__":
    main()
