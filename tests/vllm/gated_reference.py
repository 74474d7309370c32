"""The confidence gate written down once more, in transformers: an oracle for the serving tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache


@dataclass
class Decoded:
    """tokens: generated. logprobs: of each. fired: positions decided again."""

    tokens: list[int]
    logprobs: list[float]
    fired: list[int]


@torch.no_grad()
def decode_with_gate(
    base: nn.Module,
    fp4: nn.Module,
    prompt: list[int],
    tokens: int,
    tau: float,
    cap: float = 1.0,
    prompt_fp4: bool = False,
) -> Decoded:
    """Greedy decoding of one prompt by two models that share a KV cache.

    Each step is the base's; where its top probability is below tau, the position is taken out of
    the cache and computed by the FP4 model.
    """
    cache, found = DynamicCache(), Decoded([], [], [])
    prefill = fp4 if prompt_fp4 else base
    if len(prompt) > 1:
        prefill(torch.tensor([prompt[:-1]]), past_key_values=cache, use_cache=True)
    token, position = prompt[-1], len(prompt) - 1
    for asked in range(1, tokens + 1):
        first = prefill if asked == 1 else base

        def run(model: nn.Module, token: int = token) -> torch.Tensor:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            return out.logits[0, -1].log_softmax(-1)

        logprobs = run(first)
        if logprobs.max().exp() < tau and len(found.fired) + 1 <= cap * asked:
            cache.crop(-1)
            logprobs = run(fp4)
            found.fired.append(position)
        token, position = int(logprobs.argmax()), position + 1
        found.tokens.append(token)
        found.logprobs.append(float(logprobs.max()))
    return found
