"""Log-probabilities and losses from scores whose classes are sharded over processes.

Each process passes the scores of its own classes and gets their log-probabilities. Backward sums
one or two numbers per row over processes, so all of them must run it, in the same order. There are
no second derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lastlayer._processes import Shards
from lastlayer.fused.prediction import top_classes
from lastlayer.fused.spread import spread_entmax


def spread_log_softmax(shards: Shards, scores: Tensor) -> Tensor:
    """Log-softmax over the classes of all processes, ``(n, here)``.

    A fully masked row is -inf and has zero gradient. Forward gathers one number per row, and
    backward sums one.
    """

    def logs(scores: Tensor) -> Tensor:
        none = scores.new_full(scores.shape[:1], -torch.inf)
        total = shards.logsumexp(scores.logsumexp(-1) if scores.shape[1] else none)
        return scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(-1)

    made: Tensor = _LogSoftmax.apply(scores, logs, shards)
    return made


def spread_topk_log_softmax(shards: Shards, scores: Tensor, k: int) -> Tensor:
    """Log-softmax over the k best classes of all processes; others are -inf, with zero gradient.

    Each process sends its k best scores per row. Backward sums one number per row.
    """

    def logs(scores: Tensor) -> Tensor:
        n, some, most = scores.shape[0], min(k, scores.shape[1]), min(k, shards.most)
        own = scores.new_full((n, most), -torch.inf)
        columns = own.new_zeros(own.shape, dtype=torch.int64)
        if some:
            own[:, :some], columns[:, :some] = top_classes(scores, some)
        merged = shards.gathered(own).transpose(0, 1).flatten(1)
        values, places = top_classes(merged, min(k, merged.shape[1]))
        best = torch.full_like(merged, -torch.inf).scatter_(-1, places, values.log_softmax(-1))
        mine = best.view(n, shards.processes, most)[:, shards.rank, :some]
        return torch.full_like(scores, -torch.inf).scatter_(-1, columns[:, :some], mine)

    made: Tensor = _LogSoftmax.apply(scores, logs, shards)
    return made


def spread_log_entmax(shards: Shards, scores: Tensor, alpha: float) -> Tensor:
    """The log of entmax over the classes of all processes, ``(n, here)``, for alpha above 1.

    It is -inf outside the support, with zero gradient. Each process sends its few candidates per
    row, as in training, and backward sums two numbers.
    """
    made: Tensor = _LogEntmax.apply(scores, shards, alpha)
    return made


def spread_sparsemax_loss(shards: Shards, scores: Tensor, labels: Tensor) -> Tensor:
    """This process's part of the multi-label sparsemax loss of each row, ``(n,)``.

    The target distribution is proportional to ``labels``, those of this process's classes. A row
    without positive labels has loss 0 and zero gradient. Backward sends nothing.
    """
    made: Tensor = _SparsemaxLoss.apply(scores, labels, shards)
    return made


class _LogSoftmax(torch.autograd.Function):
    """Scores minus their logsumexp, which excludes classes whose result is -inf."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, logs: Callable[[Tensor], Tensor], shards: Shards
    ) -> Tensor:
        made = logs(scores)
        ctx.shards = shards
        ctx.save_for_backward(made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logs,) = ctx.saved_tensors
        grad = grad.masked_fill(logs == -torch.inf, 0.0)
        total = ctx.shards.sum(grad.sum(-1))
        return grad - logs.exp() * total.unsqueeze(-1), None, None


class _LogEntmax(torch.autograd.Function):
    """With ``q = p^(2 - alpha)``: ``dp = q (ds - <q, ds> / sum(q))``, on the support."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shards: Shards, alpha: float) -> Tensor:
        made = spread_entmax(shards, scores, alpha)[0].log_()
        ctx.shards, ctx.alpha = shards, alpha
        ctx.save_for_backward(made)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (logs,) = ctx.saved_tensors
        outside = logs == -torch.inf
        slopes = ((2.0 - ctx.alpha) * logs).exp_().masked_fill_(outside, 0.0)
        pulls = (grad * ((1.0 - ctx.alpha) * logs).exp_()).masked_fill_(outside, 0.0)
        pull, slope = ctx.shards.sum(torch.stack([pulls.sum(-1), slopes.sum(-1)]))
        # Fully masked rows have a slope of 0 and zero gradient.
        mean = pull / torch.where(slope == 0, 1.0, slope)
        return pulls - slopes * mean.unsqueeze(-1), None, None


class _SparsemaxLoss(torch.autograd.Function):
    """``<p - q, s> + (|q|^2 - |p|^2) / 2``, whose gradient is ``p - q``."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, shards: Shards) -> Tensor:
        total = shards.sum(labels.sum(-1))
        probs, peak = spread_entmax(shards, scores, 2.0)
        counted = (total > 0).unsqueeze(-1)
        shares = labels / torch.where(counted, total.unsqueeze(-1), 1.0)
        pull = torch.where(counted, probs - shares, 0.0)
        # Both distributions sum to 1, so any number may be subtracted from the scores of a row.
        below = scores - peak.masked_fill(peak == -torch.inf, 0.0).unsqueeze(-1)
        product = torch.where(pull == 0, 0.0, pull * below)
        squares = torch.where(counted, shares.square() - probs.square(), 0.0)
        # A fully masked row has infinite loss and zero gradient.
        ctx.save_for_backward(pull.masked_fill((peak == -torch.inf).unsqueeze(-1), 0.0))
        return (product + squares / 2).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (pull,) = ctx.saved_tensors
        return pull * grad.unsqueeze(-1), None, None
