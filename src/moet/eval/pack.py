"""How far a pack is from the checkpoint it was made of."""

from __future__ import annotations

from moet.checkpoints import Checkpoint
from moet.eval.fidelity import Fidelity, compare
from moet.eval.heldout import HeldOut
from moet.eval.reference import Experts, load_reference
from moet.eval.sources import fp4_experts
from moet.formats.layout import Precision
from moet.pack import Pack, PackRowSource, RowKey, RowSource
from moet.pack.weights import read_weights


def packed_experts(source: RowSource, precision: Precision) -> Experts:
    """The experts that the rows of `source` hold at `precision`, decoded as a kernel would."""
    return lambda layer, expert: read_weights(source, RowKey(layer, expert, precision))


def fidelity_of_pack(checkpoint: Checkpoint, pack: Pack, heldout: HeldOut) -> Fidelity:
    """KL and top-1 of the model with the pack's 2-bit experts, against the model with FP4 experts.

    Both run in transformers, in float32 (`reference.load_reference`).
    """
    with PackRowSource(pack, checkpoint) as source:
        base = load_reference(checkpoint, packed_experts(source, Precision.BASE))
    return compare(load_reference(checkpoint, fp4_experts(checkpoint)), base, heldout)
