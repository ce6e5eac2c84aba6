"""Losses of rows of drawn classes in plain torch: defines the truth."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype


def forward_(
    scores: Tensor, gradient: Tensor, first: Tensor, second: Tensor, columns: Tensor,
    offset: Tensor, ids: Tensor, target: Tensor, shift: Tensor | None, exact: Tensor | None,
    row_scale: Tensor | None, factor: float, n_exact: int, logistic: bool, drop_hits: bool,
    average: bool, adds: bool,
) -> None:  # fmt: skip
    """What the drawn classes of each row add up to.

    A column's logit is ``x = factor * scores + offset``; from column ``n_exact`` on ``shift`` is
    added, and with ``average`` minus the log of how many columns are drawn there. A column counts
    where its offset is above -inf and, with ``drop_hits``, its id is no target of the row.

    Args:
        scores: ``(n, m)``; overwritten.
        gradient: ``(n, m)``, gets ``row_scale`` times the slopes, and 0 where that is 0. It may be
            ``scores`` itself, or on CUDA half as wide in the same memory, row by row.
        first: ``(n,)``, gets the logarithm of Σ e^x; of a logistic loss Σ log(1 + e^x).
        second: ``(n,)``, gets the effective sample size of the drawn columns, (Σ e^x)² / Σ e^2x;
            of a logistic loss the sum of its slopes.
        columns: ``(parts, m)``, whose sum is that of the gradient over rows; empty where it is not
            wanted.
        offset: ``(m,)`` or ``(n, m)``, of the dtype of the result.
        ids: like offset.
        target: ``(n, p)``, -1 for none.
        shift: ``(n,)``.
        exact: ``(n,)``, the log of what else is in the normaliser.
        row_scale: ``(n,)``; None where no gradient is wanted.
        factor: of the scores, an inverse temperature.
        n_exact: the first so many columns are counted as they are.
        logistic: binary losses instead of a softmax.
        drop_hits: leave out columns whose id is a target.
        average: divide drawn columns by their number.
        adds: columns are added to; else they are set.
    """
    dtype = accumulation_dtype(scores.dtype)
    values = scores.to(dtype) * factor + offset
    out = (offset == -torch.inf).expand_as(values)
    if drop_hits:
        for one in target.unbind(-1):
            out = out | (ids == one.unsqueeze(-1))
    move = values.new_zeros(values.shape[0]) if shift is None else shift.to(dtype)
    drawn = values[:, n_exact:]
    if average:
        move = move - (~out[:, n_exact:]).sum(-1).clamp(min=1).to(dtype).log()
    drawn += move.unsqueeze(-1)
    values.masked_fill_(out, -torch.inf)
    if logistic:
        slopes = values.sigmoid()
        # log(1 + e^x); torch's softplus is x beyond 20, which float64 notices.
        total = -logsigmoid(-values).sum(-1)
        first.copy_(total)
        second.copy_(slopes.sum(-1))
    else:
        total = torch.logsumexp(values, -1)
        first.copy_(total)
        peak = drawn.amax(-1, keepdim=True) if drawn.shape[1] else drawn.sum(-1, keepdim=True)
        weights = (drawn - peak).exp()
        ess = weights.sum(-1).square() / weights.square().sum(-1)
        second.copy_(torch.where(peak.squeeze(-1) == -torch.inf, 0.0, ess))
        if exact is not None:
            total = torch.logaddexp(total, exact.to(dtype))
        # With nothing but -inf there is no difference to take.
        total = torch.where(total == -torch.inf, 0.0, total)
        slopes = (values - total.unsqueeze(-1)).exp()
    if row_scale is not None:
        scale = (factor * row_scale.to(dtype)).unsqueeze(-1)
        slopes = torch.where(scale == 0, 0.0, slopes * scale)
        gradient.copy_(slopes)
        if columns.numel():
            columns = columns if adds else columns.zero_()
            columns[0] += slopes.sum(0)
