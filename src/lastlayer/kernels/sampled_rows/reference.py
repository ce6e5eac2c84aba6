"""Losses of rows of drawn classes, and what surrounds them, in plain torch: defines the truth."""

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


def row_scale(hidden: Tensor, target: Tensor, mean: bool) -> Tensor:
    """What the loss of each row counts: 1, or 1 / their number with ``mean``; 0 without a target.

    ``target`` is ``(n, p)``, -1 for none; ``hidden`` says where and in what dtype.
    """
    counts = (target >= 0).any(-1).to(accumulation_dtype(hidden.dtype))
    return counts / counts.sum().clamp(min=1.0) if mean else counts


def start(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, ids: Tensor,
    log_expected: Tensor, target_log_expected: Tensor | None, row_shift: Tensor | None,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the products and the rows of scores need, for draws that all rows share.

    Args:
        hidden: ``(n, d)``.
        weight: ``(v, d)``.
        bias: ``(v,)``.
        target: one per row, ``(n,)``, -1 for none.
        ids: the classes drawn, ``(m,)``.
        log_expected: taken off their scores, ``(m,)``.
        target_log_expected: taken off those of targets, ``(n,)``.
        row_shift: added to both, ``(n,)``; to the draws by others.
        factor: an inverse temperature.

    Returns:
        Hidden, with 0 in rows without a target; the vectors drawn ``(m, d)``, in its dtype; logits
        of the targets ``(n,)``; what is added to the scores of draws ``(m,)``; and the classes of
        draws and targets ``(m + n,)``, int32, where a row without a target has the first draw's.
    """
    dtype = accumulation_dtype(hidden.dtype)
    there = target >= 0
    classes = torch.where(there, target, ids[:1].expand_as(target) if len(ids) else 0)
    clean = torch.where(there.unsqueeze(-1), hidden, 0.0)
    logits = torch.linalg.vecdot(clean.to(dtype), weight[classes].to(dtype))
    offset = -log_expected.to(dtype)
    if bias is not None:
        logits = logits + bias[classes].to(dtype)
        # A masked class has no mass, but it was drawn: -inf would say that it was not.
        offset = offset + (factor * bias[ids].to(dtype)).clamp(min=-1e38)
    logits = logits * factor
    if target_log_expected is not None:
        logits = logits - target_log_expected
    if row_shift is not None:
        logits = logits + row_shift
    entries = torch.cat([ids, classes]).int()
    return clean, weight[ids].to(hidden.dtype), logits, offset, entries


def finish_(
    first: Tensor, logits: Tensor, scale: Tensor, row_scale: Tensor | None, classes: Tensor,
    weight: Tensor, of_hidden: Tensor, factor: float, logistic: bool, with_target: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Losses, and slopes of the targets' scores; adds what targets pull to ``of_hidden``.

    ``first`` is what the draws of each row add up to; logits and classes are those of the targets.
    Losses are multiplied by ``scale``, 0 for rows that do not count, and slopes by ``row_scale``,
    None where there is no gradient. ``logistic`` is softplus(−logit) + first, instead of a softmax,
    in whose normaliser the target is ``with_target``.
    """
    # The odds of the rest against the target: inf where that is masked, also if all others are.
    odds = torch.where(logits == -torch.inf, torch.inf, first - logits)
    if logistic:
        losses, slopes = first - logsigmoid(logits), -torch.sigmoid(-logits)
    elif with_target:
        losses, slopes = -logsigmoid(-odds), -torch.sigmoid(odds)
    else:
        losses, slopes = odds, -torch.ones_like(logits)
    losses = torch.where(scale == 0, 0.0, losses * scale)
    if row_scale is None:
        return losses, torch.zeros_like(losses)
    slopes = torch.where(row_scale == 0, 0.0, slopes * (factor * row_scale))
    if of_hidden.numel():
        of_hidden += slopes.unsqueeze(-1) * weight[classes.long()].to(of_hidden.dtype)
    return losses, slopes
