"""How far a pack is from the checkpoint it was made of."""

from __future__ import annotations

import numpy as np
import torch

from moet.checkpoints import Checkpoint, ExpertWeights
from moet.eval.fidelity import Fidelity, compare
from moet.eval.heldout import HeldOut
from moet.eval.reference import Experts, load_reference
from moet.eval.sources import fp4_experts
from moet.formats import decode_matrix
from moet.formats.layout import Precision, decode_row
from moet.pack import Pack, PackRowSource, RowKey, RowSource


def packed_experts(source: RowSource, precision: Precision) -> Experts:
    """The experts that the rows of `source` hold at `precision`, decoded as a kernel would."""
    layout = source.layouts[precision]
    row = np.empty(layout.row_bytes, np.uint8)

    def experts(layer: int, expert: int) -> ExpertWeights:
        source.read(RowKey(layer, expert, precision), row)
        matrices = zip(
            decode_row(layout, row), source.factors(layer, precision)[expert], strict=True
        )
        return ExpertWeights(
            *(torch.from_numpy(decode_matrix(precision, m, float(f))) for m, f in matrices)
        )

    return experts


def fidelity_of_pack(checkpoint: Checkpoint, pack: Pack, heldout: HeldOut) -> Fidelity:
    """KL and top-1 of the model with the pack's 2-bit experts, against the model with FP4 experts.

    Both run in transformers, in float32 (`reference.load_reference`).
    """
    with PackRowSource(pack, checkpoint) as source:
        base = load_reference(checkpoint, packed_experts(source, Precision.BASE))
    return compare(load_reference(checkpoint, fp4_experts(checkpoint)), base, heldout)
