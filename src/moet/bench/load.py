"""Requests to a server that speaks the OpenAI API, sent and timed by `vllm bench serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet.errors import MoetError


@dataclass(frozen=True)
class Load:
    """streams: requests at a time. prompt, tokens: of each request, in and out. requests: of each
    stream, one after another."""

    streams: int
    prompt: int
    tokens: int
    requests: int


def send(
    url: str, model: str, tokenizer: str, load: Load, key: str | None = None
) -> dict[str, Any]:
    """What vLLM's benchmark reports: times in ms as `median_tpot_ms` (a token after the first),
    `median_ttft_ms` (the first), `p99_itl_ms`; `output_throughput` in tokens/s.

    Prompts are random tokens, alike in every run; answers are as long as asked for.

    Args:
        model: its name at the server. tokenizer: a directory or hub name. key: the API's.

    Raises MoetError with the end of the output if the benchmark ends with an error, or if the
    server failed a request.
    """
    with tempfile.TemporaryDirectory(prefix="moet-bench-") as directory:
        arguments = {
            "backend": "openai",
            "base-url": url,
            "endpoint": "/v1/completions",
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": load.prompt,
            "random-output-len": load.tokens,
            "num-prompts": load.streams * load.requests,
            "max-concurrency": load.streams,
            "num-warmups": load.streams,
            "percentile-metrics": "ttft,tpot,itl",
            "seed": 0,
            "temperature": 0,
            "result-dir": directory,
            "result-filename": "result.json",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        command += ["--ignore-eos", "--save-result", "--disable-tqdm"]
        environment = {**os.environ, **({"OPENAI_API_KEY": key} if key else {})}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        file = Path(directory) / "result.json"
        if run.returncode or not file.exists():
            said = [*run.stdout.splitlines(), *run.stderr.splitlines()]
            raise MoetError(
                f"`vllm bench serve` ended with {run.returncode}:\n" + "\n".join(said[-15:]),
                "Its last lines say why.",
            )
        found: dict[str, Any] = json.loads(file.read_text())
    if found["failed"]:
        raise MoetError(
            f"the server failed {found['failed']} of {found['num_prompts']} requests.",
            "Its log says why.",
        )
    return found
