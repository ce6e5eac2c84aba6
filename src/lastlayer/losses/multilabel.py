"""Multi-label losses other than ZLPR, label smoothing and mixup.

Binary cross entropy and the asymmetric loss are sums over classes; the sparsemax loss uses one
distribution over the positives of a row. Label smoothing and mixup produce labels between 0 and 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import (
    check_generator,
    check_int,
    check_not_negative,
    check_positive,
    check_real,
    check_scores,
    check_tensor,
)
from lastlayer._labels import (
    check_allowed,
    check_label_smoothing,
    check_labels,
    check_multilabel,
    reduced,
)
from lastlayer._torch import accumulation_dtype, in_dtype, in_functorch
from lastlayer.fused.function import Call, fused_loss
from lastlayer.kernels.label_loss import reference
from lastlayer.losses._label_engine import LabelEngine, as_rows
from lastlayer.losses.entmax import label_loss, sparsemax_loss
from lastlayer.maps.sparsemax import sparsemax


def bce_loss(
    scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""Binary cross entropy, summed over the classes of each row.

    .. math:: L(s, t) = -\sum_i t_i \log \sigma(s_i) + (1 - t_i) \log(1 - \sigma(s_i))

    A proper loss: at its minimum :math:`\sigma(s_i)` is the probability of label i, whichever
    labels occur together. All negatives add up, even easy ones. With few positives among many
    classes they are most of the gradient early in training; :func:`lastlayer.zlpr_loss` and
    :func:`lastlayer.asymmetric_loss` avoid that.

    A label of exactly 0 or 1 has only one of the two terms, and a masked class neither, so that
    infinite scores of the correct sign cost nothing. (With ``reduction="mean"`` torch's
    ``binary_cross_entropy_with_logits`` also averages over the classes of a row.)

    Cost: scores and labels are read once in forward and once in backward, which writes the
    gradient; nothing of their size is stored in between.

    Args:
        scores: ``(*batch, n)``.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1]. A floating
            target gets a gradient if it requires one.
        mask: bool that broadcasts to ``scores``; False masks a class out.
        reduction: "mean" over rows with at least one unmasked class (0 if there are none), "sum" or
            "none" for the loss of each row.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> bce_loss(torch.zeros(2, 3), torch.eye(3)[:2])
        tensor(2.0794)
    """
    check_multilabel(scores, target, mask, reduction)
    return _loss(scores, target, mask, (0.0, 0.0, 0.0, True), reduction)


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
    r"""Binary cross entropy that down-weights easy classes, negatives more than positives.

    .. math:: L(s, t) = -\sum_i t_i\,(1 - p_i)^{\gamma_+} \log p_i
              + (1 - t_i)\,q_i^{\gamma_-} \log(1 - q_i),
              \qquad p_i = \sigma(s_i), \quad q_i = \max(p_i - m, 0)

    Negatives with a probability below the margin m are dropped; the others have the weight
    :math:`q^{\gamma_-}`. With both gammas and the margin at 0 it is :func:`lastlayer.bce_loss`. It
    is not a proper loss: after training :math:`\sigma(s)` is not a probability.

    It is computed in float32 at least: in float16 :math:`\sigma(-20)` is 0, and the loss of an easy
    negative would be :math:`0 \cdot \log 0`. The cost is that of :func:`lastlayer.bce_loss`.

    Args:
        scores: ``(*batch, n)``.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1].
        gamma_negative: exponent for negatives, at least 0.
        gamma_positive: exponent for positives, at least 0.
        margin: the probability below which a negative is dropped, from 0 to below 1.
        focus_gradient: whether the weights, such as :math:`q^{\gamma_-}`, are differentiated too.
            False treats them as constants, as the authors' code does by default.
        mask: bool that broadcasts to ``scores``; False masks a class out.
        reduction: "mean" over rows with at least one unmasked class (0 if there are none), "sum"
            (as in the authors' code) or "none" for the loss of each row.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> asymmetric_loss(torch.tensor([[2.0, -4.0]]), torch.tensor([[1, 0]]))
        tensor(0.0151)

    Reference:
        Ridnik et al., Asymmetric Loss For Multi-Label Classification, ICCV 2021, arXiv:2009.14119.
    """
    check_multilabel(scores, target, mask, reduction)
    check_not_negative("gamma_negative", gamma_negative)
    check_not_negative("gamma_positive", gamma_positive)
    check_real("margin", margin, "a number of at least 0 and below 1", lambda x: 0.0 <= x < 1.0)
    options = float(gamma_negative), float(gamma_positive), float(margin), bool(focus_gradient)
    return _loss(scores, target, mask, options, reduction)


def _loss(
    scores: Tensor, target: Tensor, mask: Tensor | None, options: tuple[Any, ...], reduction: str
) -> Tensor:
    if not target.requires_grad and not in_functorch():
        return fused_loss(_ENGINE, (scores, target, mask), options, reduction)[0]
    losses = reference.losses_of(scores, target, mask, *options)
    counts = None if mask is None else mask.expand(scores.shape).any(-1)
    return reduced(losses, counts, reduction)


class _CrossEntropies(LabelEngine):
    """Operands: scores, a target, a mask."""

    name = "label_loss_on_scores"
    schema = "float gamma_negative, float gamma_positive, float margin, bool focus_gradient"
    n_constants = 2
    kept = (0, 1, 2)

    def losses(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
        rows = as_rows(call.operands)
        losses, counts = kernels.label_loss.forward("auto", *rows, *call.options[:3])
        return losses, None, counts

    def gradient(self, call: Call, pieces: Sequence[Any], factor: Tensor) -> Tensor:
        del pieces  # there are none
        rows = as_rows(call.operands)
        gradient: Tensor = kernels.label_loss.backward("auto", *rows, *call.options, factor)
        return gradient

    def slope(self, call: Call) -> Tensor:
        return reference.gradient(*as_rows(call.operands), *call.options)


_ENGINE = _CrossEntropies()


def multilabel_sparsemax_loss(
    scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""The sparsemax loss against the uniform distribution over the positives of a row.

    .. math:: L(s, t) = \tfrac12 \|s - q\|^2 - \tfrac12 \|s - \mathrm{sparsemax}(s)\|^2,
              \qquad q_i = t_i / \textstyle\sum_j t_j

    It is zero exactly if sparsemax gives each of k positives 1/k and every other class 0; the
    gradient is :math:`\mathrm{sparsemax}(s) - q`. Predict labels with
    :func:`lastlayer.multilabel_sparsemax_predict`.

    Rows without positives have no target distribution and are ignored. Choose
    :func:`lastlayer.zlpr_loss` if rows without labels matter.

    Cost: one forward of sparsemax, O(n) per row.

    Args:
        scores: ``(*batch, n)``; -inf masks a class out.
        target: labels of that shape: bool, integers 0 and 1, or floating in [0, 1]. The target
            distribution is proportional to them.
        mask: bool that broadcasts to ``scores``; False masks a class out.
        reduction: "mean" over rows with an unmasked positive (0 if there are none), "sum" or
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
    if mask is not None:
        target = torch.where(mask, target, 0)
        scores = scores.masked_fill(~mask, -torch.inf)
    if scores.shape[-1] and not target.requires_grad and not in_functorch():
        return label_loss(scores, target, reduction)
    labels = target.to(accumulation_dtype(scores.dtype))
    if scores.shape[-1] == 0:
        return reduced(labels.sum(-1), torch.zeros_like(labels.sum(-1)), reduction)
    total = labels.sum(-1, keepdim=True)
    counts = total > 0
    # Rows without positives are replaced by a perfect prediction: loss and gradient are 0.
    first = torch.arange(scores.shape[-1], device=scores.device) == 0
    right = first.to(labels.dtype).expand_as(labels)
    shares = torch.where(counts, labels / torch.where(counts, total, 1.0), right)
    rows = torch.where(counts, scores, torch.where(first, 0.0, -torch.inf).to(scores.dtype))
    losses = sparsemax_loss(rows, shares, reduction="none")
    return reduced(losses, counts, reduction)


def multilabel_sparsemax_predict(
    scores: Tensor, threshold: float = 0.0, *, mask: Tensor | None = None
) -> Tensor:
    """Predicts the labels whose sparsemax probability exceeds a threshold.

    With a threshold of 0 these are the classes of the support, at least one per row. The authors
    choose the threshold on held-out data.

    Args:
        scores: ``(*batch, n)``.
        threshold: from 0 to below 1; with 1/k at most k labels are predicted.
        mask: bool that broadcasts to ``scores``; False masks a class out.

    Returns:
        A bool tensor of the shape of the scores.

    Example:
        >>> multilabel_sparsemax_predict(torch.tensor([0.6, 0.5, -0.5]))
        tensor([ True,  True, False])

    Reference:
        Martins and Astudillo, From Softmax to Sparsemax, ICML 2016, arXiv:1602.02068.
    """
    check_scores(scores)
    check_allowed(mask, scores)
    check_real("threshold", threshold, "a number from 0 to below 1", lambda x: 0.0 <= x < 1.0)
    # Rounding to bfloat16, unlike float16, does not turn any probability into 0.
    if threshold or scores.dtype != torch.bfloat16:
        scores = in_dtype(scores, accumulation_dtype(scores.dtype))
    return sparsemax(scores, mask=mask) > threshold


class Mixed(NamedTuple):
    """The result of :func:`lastlayer.mixup`: each row mixed with another row of the batch.

    Attributes:
        inputs: mixed inputs, of the shape of the given ones.
        target: soft labels, or lists of twice the length.
        values: labels of the listed classes; None for a dense target.
        weight: ``(rows,)``, the weight of the row itself.
        partner: ``(rows,)`` int64, the row it was mixed with.
    """

    inputs: Tensor
    target: Tensor
    values: Tensor | None
    weight: Tensor
    partner: Tensor


def smooth_labels(target: Tensor, smoothing: float) -> Tensor:
    r"""Label smoothing: a label of 0 becomes ``smoothing``, and 1 becomes ``1 - smoothing``.

    .. math:: t \mapsto \varepsilon + (1 - 2 \varepsilon)\, t

    For :func:`lastlayer.zlpr_loss` and :func:`lastlayer.bce_loss`. (In some libraries smoothing of
    binary labels is twice this number.) For lists of positives
    ``zlpr_loss_from_indices(…, label_smoothing=)`` gives the same without a dense target.

    With n classes the smoothed negatives add up: at the optimum of ZLPR their scores are
    :math:`s = -\tfrac12 \log((1 - \varepsilon) / \varepsilon)` rather than at :math:`-\infty`,
    and their sum in the second term is about :math:`n \sqrt{\varepsilon}`. Keep :math:`\varepsilon`
    well below the share of positives.

    Args:
        target: bool, integer or floating labels in [0, 1], of any shape.
        smoothing: from 0 to below 1/2.

    Returns:
        Labels in the dtype of the target if it is floating, else in torch's default dtype.

    Example:
        >>> smooth_labels(torch.tensor([0, 1]), 0.1)
        tensor([0.1000, 0.9000])
    """
    check_tensor("target", target)
    check_labels(target)
    check_label_smoothing(smoothing, "smoothing")
    if not target.is_floating_point():
        target = target.to(torch.get_default_dtype())
    return smoothing + (1.0 - 2.0 * smoothing) * target


def mixup(
    inputs: Tensor, target: Tensor, *, alpha: float = 0.2, generator: torch.Generator | None = None
) -> Mixed:
    r"""Mixes each row, and its labels, with another row of the batch.

    .. math:: x_i \mapsto \lambda_i x_i + (1 - \lambda_i)\, x_{\pi(i)}, \qquad
              t_i \mapsto \lambda_i t_i + (1 - \lambda_i)\, t_{\pi(i)}, \qquad
              \lambda_i \sim \mathrm{Beta}(\alpha, \alpha)

    with a random permutation :math:`\pi` and one :math:`\lambda` per row.

    Args:
        inputs: ``(rows, …)``, floating.
        target: dense labels ``(rows, …)``: bool, integers 0 and 1, or floating in [0, 1].
        alpha: above 0; with small values most rows stay nearly unchanged.
        generator: random number generator, on the device of the inputs.

    Returns:
        ``Mixed(inputs, target, values, weight, partner)``, with a floating ``target`` for
        :func:`lastlayer.zlpr_loss` or :func:`lastlayer.bce_loss`.

    Example:
        >>> mixed = mixup(torch.randn(4, 8), torch.eye(4))
        >>> mixed.target.sum(-1)
        tensor([1., 1., 1., 1.])

    Reference:
        Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018, arXiv:1710.09412.
    """
    _check_rows(inputs, "target", target)
    check_labels(target)
    weight, partner = _draw(inputs, alpha, generator)
    if not target.is_floating_point():
        target = target.to(torch.get_default_dtype())
    return Mixed(
        _between(inputs, weight, partner), _between(target, weight, partner), None, weight, partner
    )


def mixup_from_indices(
    inputs: Tensor,
    positives: Tensor,
    *,
    alpha: float = 0.2,
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
) -> Mixed:
    """:func:`lastlayer.mixup` for padded lists of positives, without a dense target.

    The list of a row is followed by that of its partner. A class in both has the label 1, any other
    class the weight of the row it comes from. (CSR lists have no fixed size after mixing; pad them
    first.)

    Args:
        inputs: ``(rows, …)``, floating.
        positives: integers ``(rows, m)``, padded with ``ignore_index``.
        alpha: above 0.
        ignore_index: the padding id.
        generator: random number generator, on the device of the inputs.

    Returns:
        ``Mixed(inputs, target, values, weight, partner)`` with lists and values ``(rows, 2m)`` for
        :func:`lastlayer.zlpr_loss_from_indices`.

    Example:
        >>> mixed = mixup_from_indices(torch.randn(4, 8), torch.tensor([[0, 3]] * 4))
        >>> mixed.target[0], mixed.values[0]
        (tensor([   0,    3, -100, -100]), tensor([1., 1., 0., 0.]))
    """
    _check_rows(inputs, "positives", positives)
    ignore_index = check_int("ignore_index", ignore_index, least=None)
    if positives.is_floating_point() or positives.dtype == torch.bool or positives.dim() != 2:
        raise ValueError(
            "positives: expected lists of integer class ids of shape (rows, m), padded with "
            f"ignore_index, got {positives.dtype} of shape {tuple(positives.shape)}; use "
            "lastlayer.mixup for dense labels"
        )
    positives = positives.long()
    weight, partner = _draw(inputs, alpha, generator)
    other = positives[partner]
    own = weight.unsqueeze(-1).expand_as(positives)
    same = positives.unsqueeze(-1) == other.unsqueeze(-2)
    values = torch.cat([torch.where(same.any(-1), 1.0, own), 1.0 - own], -1)
    other = other.masked_fill(same.any(-2), ignore_index)
    lists = torch.cat([positives, other], -1)
    values = values.masked_fill(lists == ignore_index, 0.0)
    return Mixed(_between(inputs, weight, partner), lists, values, weight, partner)


def _draw(inputs: Tensor, alpha: Any, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    alpha = check_positive("alpha", alpha)
    check_generator(generator, inputs.device, "inputs")
    n_rows, device = inputs.shape[0], inputs.device
    # A Beta sample is a ratio of Gamma samples; in float64 both underflow only for a tiny alpha.
    gammas = torch._standard_gamma(
        torch.full((2, n_rows), alpha, dtype=torch.float64, device=device), generator
    )
    total = gammas.sum(0)
    weight = torch.where(total > 0, gammas[0] / total, 0.5).to(torch.get_default_dtype())
    return weight, torch.randperm(n_rows, device=device, generator=generator)


def _between(rows: Tensor, weight: Tensor, partner: Tensor) -> Tensor:
    share = weight.to(rows.dtype).reshape(-1, *(1,) * (rows.dim() - 1))
    return share * rows + (1.0 - share) * rows[partner]


def _check_rows(inputs: Any, name: str, target: Any) -> None:
    check_tensor("inputs", inputs)
    check_tensor(name, target)
    if not inputs.is_floating_point() or inputs.dim() == 0:
        raise TypeError(
            f"inputs: expected a floating tensor with a batch dimension, got {inputs.dtype} of "
            f"shape {tuple(inputs.shape)}; token ids cannot be mixed, but their embeddings can"
        )
    if target.dim() == 0 or target.shape[0] != inputs.shape[0]:
        raise ValueError(
            f"{name}: expected {inputs.shape[0]} rows, as many as inputs, got shape "
            f"{tuple(target.shape)}"
        )
