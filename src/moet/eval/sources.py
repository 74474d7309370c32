"""Where routed experts come from: the checkpoint, another block format, the 2-bit base."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moet.checkpoints import PROJECTIONS, Checkpoint, ExpertWeights, Projection
from moet.eval.reference import Experts
from moet.formats import FORMATS, Precision
from moet.formats.numbers import floor_log2
from moet.quantize import BLOCK, BaseQuantizer, Expert, MatrixContext

Convert = Callable[[Tensor, MatrixContext], Tensor]


def fp4_experts(checkpoint: Checkpoint) -> Experts:
    """The experts at FP4: the checkpoint's own where it is FP4, else MXFP4 by the OCP rule."""
    mxfp4 = FORMATS[Precision.MXFP4]
    ours = mapped(
        checkpoint.decode_expert, lambda weight, _: mxfp4.decode(mxfp4.encode(weight, "ocp"))
    )

    def experts(layer: int, expert: int) -> ExpertWeights:
        own = checkpoint.expert_format(layer) in (Precision.MXFP4, Precision.NVFP4)
        return (checkpoint.decode_expert if own else ours)(layer, expert)

    return experts


def two_bit_experts(experts: Experts, quantizer: BaseQuantizer) -> Experts:
    """What a quantizer makes of `experts`, decoded."""

    def quantized(layer: int, expert: int) -> ExpertWeights:
        weights = Expert(*(weight.numpy() for weight in experts(layer, expert)))
        done = quantizer.quantize_expert(weights, layer, expert)
        return ExpertWeights(*(torch.from_numpy(matrix.decode()) for matrix in done))

    return quantized


def power_of_two_experts(experts: Experts) -> Experts:
    """The scheme that the levels are measured against: {±1, ±4} at the scale that FP4 has anyway.

    A block of 32 keeps the OCP scale 2^(floor(log2 amax) − 2); each weight takes the nearest of ±1
    and ±4 times it; zeros are + and − by turns along a row. Nothing is fitted.
    """
    return mapped(experts, lambda weight, _: _power_of_two(weight))


def mapped(experts: Experts, convert: Convert) -> Experts:
    """`experts` with every matrix [N, K] converted."""

    def converted(layer: int, expert: int) -> ExpertWeights:
        weights = experts(layer, expert)

        def matrix(projection: Projection, weight: Tensor) -> Tensor:
            return convert(weight, MatrixContext(layer, expert, projection))

        return ExpertWeights(*map(matrix, PROJECTIONS, weights))

    return converted


def _power_of_two(weight: Tensor) -> Tensor:
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), floor_log2(amax) - 2), 0.0)
    turns = torch.where(torch.arange(BLOCK) % 2 == 0, 1.0, -1.0)
    sign = torch.where(blocks == 0, turns, blocks.sign())
    magnitude = torch.where(blocks.abs() > 2.5 * scale, 4.0, 1.0)
    return (sign * magnitude * scale).reshape(weight.shape)
