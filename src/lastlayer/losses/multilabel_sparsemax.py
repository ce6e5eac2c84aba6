"""Sparsemax for several right answers: a distribution over the positives, and a threshold."""

from typing import Any

import torch
from torch import Tensor

from lastlayer._checks import check_scores
from lastlayer._torch import accumulation_dtype
from lastlayer.losses._multilabel import check_allowed, check_multilabel, reduced
from lastlayer.losses.entmax import sparsemax_loss
from lastlayer.maps.sparsemax import sparsemax


def multilabel_sparsemax_loss(
    scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""The sparsemax loss against the uniform distribution over the positives of a row.

    .. math:: L(s, t) = \tfrac12 \|s - q\|^2 - \tfrac12 \|s - \mathrm{sparsemax}(s)\|^2,
              \qquad q_i = t_i / \textstyle\sum_j t_j

    It is zero exactly where sparsemax gives each of k positives 1/k and every other class 0; the
    gradient is :math:`\mathrm{sparsemax}(s) - q`. Labels are predicted by
    :func:`lastlayer.multilabel_sparsemax_predict`.

    A row has something to learn only in relation to its positives: one that has none is left out.
    Choose :func:`lastlayer.zlpr_loss` where rows without a label matter.

    Cost: one forward of sparsemax, O(n) a row.

    Args:
        scores: ``(*batch, n)``; -inf is a legal mask.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1], in proportion
            to which the distribution is made.
        mask: bool that broadcasts to ``scores``, True for classes that count.
        reduction: "mean" over rows with a positive that counts (0 where there is none), "sum" or
            "none"; other rows have loss 0.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> scores = torch.tensor([[0.5, 0.5, -0.5], [0.0, 0.0, 0.0]])
        >>> multilabel_sparsemax_loss(scores, torch.tensor([[1, 1, 0]] * 2), reduction="none")
        tensor([0.0000, 0.0833])

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """
    check_multilabel(scores, target, mask, reduction)
    labels = target.to(accumulation_dtype(scores.dtype))
    if mask is not None:
        labels = torch.where(mask, labels, 0.0)
        scores = scores.masked_fill(~mask, -torch.inf)
    if scores.shape[-1] == 0:
        return reduced(labels.sum(-1), torch.zeros_like(labels.sum(-1)), reduction)
    total = labels.sum(-1, keepdim=True)
    counts = total > 0
    # A row that is left out is replaced by one that is right: loss and gradient are 0.
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    right = first.to(labels.dtype).expand_as(labels)
    shares = torch.where(counts, labels / torch.where(counts, total, 1.0), right)
    rows = torch.where(counts, scores, torch.where(first, 0.0, -torch.inf).to(scores.dtype))
    losses = sparsemax_loss(rows, shares, reduction="none")
    return reduced(losses, counts, reduction)


def multilabel_sparsemax_predict(
    scores: Tensor, threshold: float = 0.0, *, mask: Tensor | None = None
) -> Tensor:
    """The labels to which sparsemax gives more than a threshold.

    At 0 these are the classes of its support, of which there is at least one a row. The authors
    choose the threshold on held-out data.

    Args:
        scores: ``(*batch, n)``.
        threshold: from 0 to below 1; 1/k would ask for no more than k labels.
        mask: bool that broadcasts to ``scores``, True for classes that count.

    Returns:
        bool of the shape of the scores.

    Example:
        >>> multilabel_sparsemax_predict(torch.tensor([0.6, 0.5, -0.5]))
        tensor([ True,  True, False])

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """
    check_scores(scores)
    check_allowed(mask, scores)
    _check_threshold(threshold)
    return sparsemax(scores.to(accumulation_dtype(scores.dtype)), mask=mask) > threshold


def _check_threshold(threshold: Any) -> None:
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: expected a number, got {type(threshold).__name__}")
    if not 0.0 <= threshold < 1.0:
        raise ValueError(f"threshold: expected 0 to below 1, a probability, got {threshold}")
