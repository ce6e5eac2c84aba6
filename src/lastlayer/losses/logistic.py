"""A sum over classes of binary losses: cross entropy, and its asymmetric form."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lastlayer._torch import accumulation_dtype
from lastlayer.losses._multilabel import check_multilabel, reduced


def binary_cross_entropy_loss(
    scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""The binary cross entropy of all classes, summed over those of a row.

    .. math:: L(s, t) = -\sum_i t_i \log \sigma(s_i) + (1 - t_i) \log(1 - \sigma(s_i))

    A proper loss: at its minimum :math:`\sigma(s_i)` is the probability of label i, whatever labels
    come together. All negatives add up, however easy; where positives are few among many classes
    that is most of the gradient early on, and :func:`lastlayer.zlpr_loss` and
    :func:`lastlayer.asymmetric_loss` are two remedies.

    A label of exactly 0 or 1 takes one of the two terms alone, and a masked class neither, so that
    infinite scores on the right side cost nothing. (torch's function of this name takes
    probabilities; its ``binary_cross_entropy_with_logits`` averages over the classes of a row too.)

    Cost: a few passes over the scores, in torch operations that can be differentiated twice.

    Args:
        scores: ``(*batch, n)``.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1].
        mask: bool that broadcasts to ``scores``, True for classes that count.
        reduction: "mean" over rows in which any class counts (0 where there is none), "sum" or
            "none" for the loss of each row.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> binary_cross_entropy_loss(torch.zeros(2, 3), torch.eye(3)[:2])
        tensor(2.0794)
    """
    check_multilabel(scores, target, mask, reduction)
    found, missed, labels, allowed = _sides(scores, target, mask)
    losses = -(labels * logsigmoid(found) + (1.0 - labels) * logsigmoid(-missed)).sum(-1)
    return reduced(losses, _counting(allowed, scores), reduction)


def asymmetric_loss(
    scores: Tensor,
    target: Tensor,
    *,
    gamma_negative: float = 4.0,
    gamma_positive: float = 1.0,
    margin: float = 0.05,
    focus_gradient: bool = True,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    r"""Binary cross entropies that fade where a class is easy, negatives faster than positives.

    .. math:: L(s, t) = -\sum_i t_i\,(1 - p_i)^{\gamma_+} \log p_i
              + (1 - t_i)\,q_i^{\gamma_-} \log(1 - q_i),
              \qquad p_i = \sigma(s_i), \quad q_i = \max(p_i - m, 0)

    Negatives with a probability below the margin m are dropped, others count with
    :math:`q^{\gamma_-}`. With both gammas and the margin at 0 it is
    :func:`lastlayer.binary_cross_entropy_loss`. It is not a proper loss: :math:`\sigma(s)` is no
    probability afterwards.

    It is computed in float32 at least: in float16 :math:`\sigma(-20)` is 0, and the loss of an easy
    negative would be :math:`0 \cdot \log 0`. The grad mode of the caller stays as it is.

    Args:
        scores: ``(*batch, n)``.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1].
        gamma_negative: the power for negatives, at least 0.
        gamma_positive: the power for positives, at least 0.
        margin: the probability below which a negative is dropped, from 0 to below 1.
        focus_gradient: whether the powers are differentiated too. False takes them as weights
            that are given, as the authors' code does by default.
        mask: bool that broadcasts to ``scores``, True for classes that count.
        reduction: "mean" over rows in which any class counts (0 where there is none), "sum" (as the
            authors' code has it) or "none" for the loss of each row.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> asymmetric_loss(torch.tensor([[2.0, -4.0]]), torch.tensor([[1, 0]]))
        tensor(0.0151)

    Reference:
        Ridnik et al., Asymmetric Loss For Multi-Label Classification, ICCV 2021, arXiv:2009.14119.
    """
    check_multilabel(scores, target, mask, reduction)
    _check_number("gamma_negative", gamma_negative)
    _check_number("gamma_positive", gamma_positive)
    _check_number("margin", margin, below=1.0)
    found, missed, labels, allowed = _sides(scores, target, mask)
    positives = labels * logsigmoid(found)
    if gamma_positive:
        positives = positives * _focus(torch.sigmoid(-found), gamma_positive, focus_gradient)
    shifted = torch.sigmoid(missed) - margin
    counts = ~(shifted <= 0)  # a NaN counts
    rest = torch.where(counts, torch.sigmoid(-missed) + margin, 1.0)
    negatives = (1.0 - labels) * (rest.log() if margin else logsigmoid(-missed))
    if gamma_negative:
        # Replaced where it is dropped: a power below 1 has an infinite slope at 0.
        inside = torch.where(counts, shifted, 1.0)
        negatives = negatives * _focus(inside, gamma_negative, focus_gradient)
    losses = -(positives + torch.where(counts, negatives, 0.0)).sum(-1)
    return reduced(losses, _counting(allowed, scores), reduction)


def _sides(
    scores: Tensor, target: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Scores as those of positives and of negatives, with no part where a label leaves none.

    There a score is replaced by one that is infinitely right, which costs exactly 0 with gradient
    0, whatever stood there.
    """
    scores, labels = (
        scores.to(accumulation_dtype(scores.dtype)),
        target.to(accumulation_dtype(scores.dtype)),
    )
    if mask is None:
        positive, negative = labels > 0, labels < 1
    else:
        positive, negative = mask & (labels > 0), mask & (labels < 1)
        labels = torch.where(mask, labels, 0.0)
    found = torch.where(positive, scores, torch.inf)
    return found, torch.where(negative, scores, -torch.inf), labels, mask


def _counting(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(scores.shape).any(-1)


def _focus(probability: Tensor, gamma: float, differentiated: bool) -> Tensor:
    return (probability if differentiated else probability.detach()) ** gamma


def _check_number(name: str, value: Any, below: float = torch.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not 0.0 <= value < below:
        upper = "" if below == torch.inf else f" and below {below:g}"
        raise ValueError(f"{name}: expected a number of at least 0{upper}, got {value}")
