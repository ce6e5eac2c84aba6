"""The three matrix products of a linear layer with a loss on it, into memory that is there."""

from typing import Any

import torch
from torch import Tensor

# Numbers that are widened at a time where no product gives float32 from half precision.
_WIDENED = 1 << 22


def scores_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``hidden @ weight.T + bias`` into the first rows of ``out``, which may be wider."""
    if out.shape[0] != hidden.shape[0]:
        out = out[: hidden.shape[0]]
    if out.dtype == hidden.dtype:
        if bias is None:
            return torch.mm(hidden, weight.t(), out=out)
        return torch.addmm(bias, hidden, weight.t(), out=out)
    if out.device.type == "cuda":
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        hidden = hidden.to(out.dtype)
        for part in _slices(weight.shape[0], weight.shape[1]):
            out[:, part] = hidden @ weight[part].to(out.dtype).t()
    return out if bias is None else out.add_(bias)


def set_weight_gradient(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """``gradient.T @ hidden`` into ``total``, which may be wider."""
    if total.dtype == gradient.dtype:
        torch.mm(gradient.t(), hidden, out=total)
    elif gradient.device.type == "cuda":
        torch.mm(gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        add_weight_gradient_(total.zero_(), gradient, hidden)


def add_weight_gradient_(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """Adds ``gradient.T @ hidden`` to ``total``, which may be wider."""
    if total.dtype == gradient.dtype:
        torch.addmm(total, gradient.t(), hidden, out=total)
    elif gradient.device.type == "cuda":
        torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        hidden = hidden.to(total.dtype)
        for part in _slices(total.shape[0], gradient.shape[0]):
            some = gradient[:, part].t().to(total.dtype)
            torch.addmm(total[part], some, hidden, out=total[part])


def _slices(count: int, numbers_each: int) -> list[slice]:
    step = max(1, _WIDENED // max(1, numbers_each))
    return [slice(first, first + step) for first in range(0, count, step)]


def wide_scores(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``rows @ weight.T + bias`` in float32, or in float64 from float64; differentiable."""
    if rows.dtype in (torch.float32, torch.float64):
        return torch.nn.functional.linear(rows, weight, bias)
    scores: Tensor = _WideScores.apply(rows, weight, bias)
    return scores


class _WideScores(torch.autograd.Function):
    """Keeps what rounding scores to half precision would lose."""

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
