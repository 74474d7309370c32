"""`moet demo`: the whole of moet on the embedded model, on any machine."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

import moet
from moet.checkpoints import Checkpoint
from moet.cli.device import Device
from moet.cli.pack import make_pack
from moet.cli.server import Server
from moet.cli.ui import emit_json, err, out
from moet.errors import CheckpointError
from moet.eval.heldout import read_heldout
from moet.pack import Pack
from moet.units import byte_size

PROMPT = "class Stack:\n    def push(self, item):"
QUESTION = "What is 64 minus 9?"
MAX_TOKENS = 64
WINDOWS = 4  # of each held-out segment: enough for two digits, and for the demo's time


@dataclass(frozen=True)
class Answer:
    """Text that a server streamed, its tokens, and the seconds from the first to the last."""

    text: str
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return (self.tokens - 1) / self.seconds if self.tokens > 1 else 0.0


def demo(
    model: Annotated[
        Path | None, typer.Option(help="A small checkpoint. Default: the embedded nano-moe.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Room for 2-bit experts while serving.")] = "25%",
    keep: Annotated[
        Path | None, typer.Option(help="Keep the pack and the server's log in this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Pack the embedded model, serve it with few experts in memory, ask it, and measure it.

    Takes about two minutes on two cores and needs no GPU. The model is a real one, trained for this
    project, but tiny (20.7 M parameters): judge the mechanism by it, not the prose.
    """
    # Not at the top: transformers takes seconds and 170 MB, and every command imports this module.
    from moet.eval.pack import fidelity_of_pack

    path = model or embedded_model()
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(path))
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
        place = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moet-")))
        _step("Packing the routed experts at 2 bits")
        report = make_pack(checkpoint, place / "pack", force=True, device=Device.CPU)
        _step(f"Serving with room for {pool} of the experts (vLLM, OpenAI-compatible API)")
        arguments = [str(path), "--pack", str(report.path), "--base-pool", pool]
        arguments += ["--served-model-name", "demo", "--max-model-len", "1024", "--enforce-eager"]
        # On the CPU, vLLM asks that this share of all memory is free; a small model needs little.
        arguments += ["--max-num-seqs", "8", "--gpu-memory-utilization", "0.3"]
        with Server(arguments, place / "server.log", _environment()) as server:
            # A model this small repeats itself when it is decoded greedily.
            prompt = {"prompt": PROMPT, "ignore_eos": True, "temperature": 0.7, "seed": 1}
            answer = _ask(server, f"completion: [cyan]{PROMPT}[/]", "/v1/completions", prompt)
            question = {"messages": [{"role": "user", "content": QUESTION}], "stop": ["\n"]}
            _ask(server, f"chat: [cyan]{QUESTION}[/] → ", "/v1/chat/completions", question)
            (stats,) = server.get("/v1/moet/stats")["ranks"]
        _step("Comparing with the FP4 model on held-out text (transformers, float32)")
        heldout = read_heldout(path).first(WINDOWS)
        pack = Pack.open(report.path)
        mean = fidelity_of_pack(checkpoint, pack, heldout).rows()[-1]
        figures = _sizes(checkpoint, pack, stats) | {
            "tokens_per_second": answer.rate,
            "hit_rate": stats["hit_rate"],
            "memory_bytes": sum(of["bytes"] for of in stats["rows"] if of["tier"] != "disk"),
            "disk_bytes": stats["disk_bytes"],
            "kl": mean.kl,
            "kl_se": mean.kl_se,
            "top1": mean.top1,
        }
    if as_json:
        emit_json(figures)
    else:
        out.print(_table(figures, pool))


def embedded_model() -> Path:
    """models/nano-moe of the checkout that this package is installed from."""
    path = Path(moet.__file__).resolve().parents[2] / "models" / "nano-moe"
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{path}: the embedded model is not there.",
            "Run this in a checkout of moet, or name a checkpoint with --model.",
        )
    return path


def _environment() -> dict[str, str]:
    """vLLM's CPU build takes most of the memory for its cache unless it is told otherwise (GiB)."""
    return {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}


def _step(text: str) -> None:
    err.print(f"\n[bold]{text}[/]")


def _ask(server: Server, lead: str, path: str, body: dict[str, Any]) -> Answer:
    """Prints `lead`, then the answer as it streams."""
    request = {"model": "demo", "max_tokens": MAX_TOKENS, "temperature": 0, **body}
    err.print(lead, end="")
    pieces, times = [], []
    for piece in server.stream(path, request):
        times.append(time.monotonic())
        pieces.append(piece)
        err.print(piece, end="", markup=False, soft_wrap=True)
    err.print()
    return Answer("".join(pieces), len(times), times[-1] - times[0])


def _sizes(checkpoint: Checkpoint, pack: Pack, stats: dict[str, Any]) -> dict[str, Any]:
    geometry = checkpoint.geometry
    experts = len(geometry.moe_layers) * geometry.num_experts
    return {
        "bf16_bytes": experts * 3 * geometry.hidden * geometry.intermediate * 2,
        "checkpoint_bytes": sum(
            checkpoint.expert_bytes(layer) * geometry.num_experts for layer in geometry.moe_layers
        ),
        "base_bytes": sum(
            layer.layout.base.row_bytes * layer.layout.experts for layer in pack.layers.values()
        ),
        # In GPU memory, where there is one.
        "resident_bytes": sum(
            tier["places"] * tier["row_bytes"]
            for tier in stats["tiers"]
            if tier["tier"] in ("gpu", "memory")
        ),
    }


def _table(figures: dict[str, Any], pool: str) -> Table:
    table = Table(title="moet demo", show_header=False, title_style="bold")
    for name, value in _lines(figures, pool):
        table.add_row(name, value)
    return table


def _lines(f: dict[str, Any], pool: str) -> Iterator[tuple[str, str]]:
    yield "routed experts in BF16", byte_size(f["bf16_bytes"])
    yield "in the checkpoint (FP4)", byte_size(f["checkpoint_bytes"])
    yield "in the pack, 2 bits", byte_size(f["base_bytes"])
    yield f"in memory while serving ({pool})", byte_size(f["resident_bytes"])
    yield "experts found in memory", f"{f['hit_rate']:.1%}"
    yield (
        "bytes used from memory / read from disk",
        (f"{byte_size(f['memory_bytes'])} / {byte_size(f['disk_bytes'])}"),
    )
    yield "decoding", f"{f['tokens_per_second']:.0f} tokens/s"
    yield "KL to the FP4 model", f"{f['kl']:.3f} ± {f['kl_se']:.3f} nats"
    yield "same most likely token as FP4", f"{f['top1']:.1%}"
