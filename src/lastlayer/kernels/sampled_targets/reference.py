"""What surrounds the rows of drawn classes in plain torch: defines the truth."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype


def row_scale(hidden: Tensor, target: Tensor, mean: bool) -> Tensor:
    """What the loss of each row counts: 1, or 1 / their number with ``mean``; 0 without a target.

    Args:
        hidden: says where and in what dtype.
        target: ``(n, p)``, -1 for none.
        mean: divide by the number of rows that count.

    Returns:
        ``(n,)``, float32, or float64 from float64.
    """
    counts = (target >= 0).any(-1).to(_wide(hidden))
    return counts / counts.sum().clamp(min=1.0) if mean else counts


def start(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ids: Tensor,
    log_expected: Tensor,
    target_log_expected: Tensor | None,
    row_shift: Tensor | None,
    factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the products and the rows of scores need, for draws that all rows share.

    Args:
        hidden: ``(n, d)``.
        weight: ``(v, d)``.
        bias: ``(v,)``.
        target: one a row, ``(n,)``, -1 for none.
        ids: the classes drawn, ``(m,)``.
        log_expected: taken off their scores, ``(m,)``.
        target_log_expected: taken off those of targets, ``(n,)``.
        row_shift: added to both, ``(n,)``; to the draws by others.
        factor: of the scores, an inverse temperature.

    Returns:
        Hidden, with 0 in rows without a target; the vectors drawn ``(m, d)``, in its dtype; logits
        of the targets ``(n,)``; what is added to the scores of draws ``(m,)``; and the classes of
        draws and targets ``(m + n,)``, int32, where a row without a target has the first draw's.
    """
    dtype = _wide(hidden)
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
    first: Tensor,
    logits: Tensor,
    scale: Tensor,
    row_scale: Tensor | None,
    classes: Tensor,
    weight: Tensor,
    of_hidden: Tensor,
    factor: float,
    logistic: bool,
    with_target: bool,
) -> tuple[Tensor, Tensor]:
    """Losses, and slopes of the targets' scores; adds what targets pull to ``of_hidden``.

    Args:
        first: what the draws of a row add up to, ``(n,)``.
        logits: of the targets, ``(n,)``.
        scale: what losses are multiplied by, ``(n,)``; 0 for rows that do not count.
        row_scale: what slopes are multiplied by, ``(n,)``; None where there is no gradient.
        classes: of the targets, ``(n,)``.
        weight: ``(v, d)``.
        of_hidden: ``(n, d)``, or empty.
        factor: of the scores.
        logistic: softplus(−logit) + first, instead of a softmax.
        with_target: whether the target is part of the normaliser of the softmax.

    Returns:
        Two times ``(n,)``; without a ``row_scale`` slopes are 0.
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


def _wide(hidden: Tensor) -> torch.dtype:
    return accumulation_dtype(hidden.dtype)
