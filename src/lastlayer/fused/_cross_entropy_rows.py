"""The row loss of the cross entropy."""

import math

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer.fused._shaping import shaped
from lastlayer.fused.engine import Chunk, RowLoss, RowResult


def cross_entropy_rows(
    class_weight: Tensor | None,
    smoothing: float,
    z_loss: float,
    softcap: float,
    temperature: float,
    statistics: bool = False,
) -> RowLoss:
    """Dense gradient in the memory of the scores."""

    def rows(scores: Tensor, chunk: Chunk) -> RowResult:
        loss, *known = kernels.softmax_rows.forward_(
            "auto",
            scores,
            chunk.target,
            chunk.target_scores,
            chunk.row_scale,
            class_weight,
            smoothing,
            z_loss,
            softcap,
            temperature,
            statistics,
        )
        gradient = None if chunk.row_scale is None else scores
        if not statistics:
            return RowResult(loss, gradient)
        lse, entropy, argmax, rank = known
        at_target = shaped(chunk.target_scores, softcap, temperature)[0]
        # In a row of nothing but -inf a difference would be none.
        log_prob = torch.where(lse == -math.inf, lse, at_target - lse)
        return RowResult(loss, gradient, (lse, log_prob, entropy, argmax, rank))

    return rows
