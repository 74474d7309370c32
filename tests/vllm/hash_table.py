"""The tables of `hashed.py`, for tests, which must not import that."""

from typing import Any

import torch


def hash_table(config: Any, layer: int) -> torch.Tensor:
    """int32 [vocabulary, top-k]: different experts for each token."""
    rng = torch.Generator().manual_seed(layer)
    scores = torch.rand(
        config.vocab_size, config.n_routed_experts, generator=rng, device="cpu", dtype=torch.float32
    )
    return scores.topk(config.num_experts_per_tok)[1].to(torch.int32).contiguous()
