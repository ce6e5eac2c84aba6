"""Multi-label losses on dense targets, for a chunk of rows at a time."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lastlayer._labels import Positives
from lastlayer.heads._scores import wide_scores

# From scores and labels of some rows to the loss of each.
RowLoss = Callable[[Tensor, Tensor], Tensor]


def dense_label_losses(
    row_loss: RowLoss,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: Positives,
    smoothing: float,
    chunks: Iterable[slice],
) -> Tensor:
    """The loss of each row, differentiable; backward makes scores and labels again.

    Args:
        row_loss: the loss.
        rows: ``(n, d)``.
        weight: ``(v, d)``.
        bias: ``(v,)`` or None.
        lists: the labels that are listed.
        smoothing: the label of all others.
        chunks: the rows that are taken together, in order.
    """

    def losses(part: slice, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        scores = wide_scores(rows, weight, bias)
        return row_loss(scores, _labels(lists, part, scores, smoothing))

    with torch.autocast(rows.device.type, enabled=False):
        made = [
            checkpoint(
                losses, part, rows[part], weight, bias, use_reentrant=False,
                preserve_rng_state=False,
            )
            for part in chunks
        ]  # fmt: skip
        return torch.cat(made)


def reduced_label_losses(
    losses: Tensor, lists: Positives, reduction: str, only_with_labels: bool
) -> Tensor:
    """The sum or mean of the losses of rows; if told so, the mean over rows with labels."""
    if reduction == "sum":
        return losses.sum()
    if not only_with_labels:
        return losses.sum() / max(1, losses.numel())
    on = lists.valid if lists.values is None else lists.values > 0
    with_labels = torch.zeros_like(lists.counts).index_add_(0, lists.rows, on.long()) > 0
    return losses.sum() / with_labels.sum().clamp(min=1)


def _labels(lists: Positives, part: slice, scores: Tensor, smoothing: float) -> Tensor:
    """The dense labels of some rows."""
    n, n_classes = scores.shape
    # One number more, for what is listed in other rows: so nothing waits for how much that is.
    labels = scores.new_full((n * n_classes + 1,), smoothing)
    inside = lists.valid & (lists.rows >= part.start) & (lists.rows < part.stop)
    place = (lists.rows - part.start) * n_classes + lists.classes
    place = torch.where(inside, place, n * n_classes)
    if lists.values is None:
        labels.scatter_(0, place, 1.0)
    else:
        labels.scatter_(0, place, lists.values.detach().to(labels.dtype))
    return labels[:-1].view(n, n_classes)
