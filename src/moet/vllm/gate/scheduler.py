"""A request's own part of the KV cache: no other request is given what the gate has decided.

vLLM's prefix cache gives a request the blocks of any other that began with the same tokens. Which
of the tokens that a request generates ran at FP4 depends on how it was decoded, so those blocks are
hashed with a key of the request's own: only the request itself finds them, when it resumes after a
preemption. Prompts are shared as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from blake3 import blake3

from moet.settings import Settings


class KeepsGeneratedBlocks:
    """Before one of vLLM's schedulers among the bases."""

    hash_block_size: int

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        settings = Settings.from_additional_config(vllm_config.additional_config)
        self._keeps_generated_blocks = settings.recovers

    def add_request(self, request: Any) -> None:
        if self._keeps_generated_blocks and request._block_hasher is not None:
            keep_generated_blocks(request, self.hash_block_size)
        super().add_request(request)  # type: ignore[misc]


def keep_generated_blocks(request: Any, block_size: int) -> None:
    """Hashes the blocks that hold the prompt's last token, or any after it, so that no other
    request finds them.

    request: of vLLM's engine, with its prompt's blocks hashed. block_size: tokens of a block.
    """
    shared = (request.num_prompt_tokens - 1) // block_size  # blocks
    hasher = _keyed(request._block_hasher, shared, os.urandom(16))
    del request.block_hashes[shared:]
    request._block_hasher = hasher
    request.update_block_hashes()


def _keyed(hasher: Callable[[Any], list[Any]], shared: int, key: bytes) -> Callable[..., list[Any]]:
    """`hasher`, with all blocks from `shared` on hashed once more, with `key`.

    Holds no reference to the request, which holds one to it.
    """

    def keyed(request: Any) -> list[Any]:
        first = len(request.block_hashes)
        return [
            blake3(block + key).digest() if first + index >= shared else block
            for index, block in enumerate(hasher(request))
        ]

    return keyed
