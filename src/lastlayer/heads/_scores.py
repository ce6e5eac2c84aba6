"""Scores that keep what half precision would round away."""

from typing import Any

import torch
from torch import Tensor

from lastlayer.fused._products import scores_into


def wide_scores(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` in float32, or in float64 from float64; differentiable."""
    if rows.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.linear(rows, weight, bias)
    scores: Tensor = _WideScores.apply(rows, weight, bias)
    return scores


class _WideScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        scores = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        return scores_into(scores, rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        narrow = grad.to(rows.dtype)
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            narrow @ weight if needs_rows else None,
            narrow.t() @ rows if needs_weight else None,
            grad.sum(0).to(ctx.bias_dtype) if needs_bias else None,
        )
