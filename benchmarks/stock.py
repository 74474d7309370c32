"""vLLM's own FP4 experts, for a model of random weights.

Importing this module in a worker replaces the repacking of weights for Marlin, a launch for each of
thousands of experts: random words are the packed form of some random weights.
"""

from __future__ import annotations

from typing import Any

import vllm._custom_ops as ops
from torch import Tensor

from benchmarks.synthetic import SyntheticExtension

_TILE, _CODES_A_WORD = 16, 8


def _as_packed(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, **_: Any) -> Tensor:
    assert num_bits == 4
    return b_q_weight.reshape(size_k // _TILE, size_n * _TILE // _CODES_A_WORD)


ops.gptq_marlin_repack = _as_packed


class StockExtension(SyntheticExtension):
    """Worker methods of the benchmark."""
