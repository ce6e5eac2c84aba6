"""ZLPR: softmax and cross entropy generalised to several labels per row."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lastlayer import kernels
from lastlayer._checks import check_reduction, check_scores
from lastlayer._labels import check_allowed, check_multilabel, reduced
from lastlayer._torch import in_functorch
from lastlayer.fused.function import Call, fused_loss
from lastlayer.fused.label_lists import check_lists, sorted_lists
from lastlayer.kernels.zlpr import reference
from lastlayer.losses._label_engine import LabelEngine, as_rows
from lastlayer.losses._module import LossModule


def zlpr_loss(
    scores: Tensor, target: Tensor, *, mask: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    r"""Zero-bounded log-sum-exp & pairwise rank-based loss: positives above 0, negatives below.

    .. math:: L(s, t) = \log\Bigl(1 + \sum_i (1 - t_i)\,e^{s_i}\Bigr)
              + \log\Bigl(1 + \sum_i t_i\,e^{-s_i}\Bigr)

    For labels 0 and 1 the first sum is over the negatives and the second over the positives. Each
    term is the cross entropy of a softmax in which the 1 is a class with score 0: the gradient of a
    class is its share of the sum, so that a million easy negatives do not outweigh one positive, as
    they do in a sum of binary cross entropies. With one class it *is* the binary cross entropy.
    Predict with ``scores > 0``.

    The limits are exact, and labels are never clipped: a label of 0 is not in the sum of positives,
    a label of 1 is not in the sum of negatives, and a masked class is in neither, whatever its
    score (-1e12, -inf, NaN) and label. Without positives the second term is log 1. An unmasked
    score of -inf adds nothing for a label of 0, and gives a loss of +inf for any other label.

    For soft labels the minimum is at :math:`\sigma(2 s_i) = t_i`. This does not hold for hard
    labels, see :func:`lastlayer.zlpr_probability`.

    Choose it for few positives among many classes; :func:`lastlayer.asymmetric_loss` and
    :func:`lastlayer.bce_loss` are alternatives.

    Cost: scores and labels are read once in forward and once in backward, which writes the
    gradient; nothing of their size is stored in between. (Rows with a score beyond 60 on the wrong
    side are read three times on CUDA.)

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
        >>> scores = torch.tensor([[2.0, -1.0, -3.0]])
        >>> zlpr_loss(scores, torch.tensor([[1, 0, 0]]))
        tensor(0.4759)
        >>> zlpr_loss(scores, torch.tensor([[1, 0, 0]]), mask=torch.tensor([True, False, True]))
        tensor(0.1755)

    Reference:
        Su et al., ZLPR: A Novel Loss for Multi-label Classification, 2022, arXiv:2208.02955; Su,
        spaces.ac.cn/archives/9064 (soft labels).
    """
    check_multilabel(scores, target, mask, reduction)
    if target.requires_grad or in_functorch():
        return _reference_loss(scores, target, mask, reduction)
    return fused_loss(_ENGINE, (scores, target, *(None,) * 4, mask), (0.0,), reduction)[0]


def zlpr_loss_from_indices(
    scores: Tensor,
    positives: Tensor,
    offsets: Tensor | None = None,
    *,
    values: Tensor | None = None,
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
    ignore_index: int | None = -100,
    reduction: str = "mean",
) -> Tensor:
    r""":func:`lastlayer.zlpr_loss` from lists of positives, without a dense target.

    Lists are padded, ``(*batch, m)``, or in CSR format: all lists concatenated, with their offsets.
    A class that is listed twice counts once. No class is reserved for padding.

    Soft labels need no dense target either. Listed classes have the label in ``values``, all others
    the label ``label_smoothing``, :math:`\varepsilon`:

    .. math:: \log\Bigl(1 + (1 - \varepsilon) \sum_{i \notin P} e^{s_i}
              + \sum_{i \in P} (1 - v_i)\,e^{s_i}\Bigr)
              + \log\Bigl(1 + \varepsilon \sum_{i \notin P} e^{-s_i}
              + \sum_{i \in P} v_i\,e^{-s_i}\Bigr)

    Listed classes are skipped in the sums over the others. Subtracting them from a sum over all
    classes would lose all digits once a positive leads.

    Cost: as :func:`lastlayer.zlpr_loss`, with one bit per label on CUDA; soft labels need a sort of
    the lists. If ``values`` need a gradient, and for second derivatives, a dense target is built.

    Args:
        scores: ``(*batch, n)``.
        positives: class ids of any integer dtype: ``(*batch, m)``, padded with ``ignore_index``; or
            ``(k,)`` with offsets.
        offsets: integers ``(rows + 1,)``, from 0 to k: the positives of row r, over the flattened
            batch dimensions, are ``positives[offsets[r] : offsets[r + 1]]``.
        values: labels of the listed classes, floating in [0, 1], of the shape of ``positives``; for
            a class that is listed twice the first counts. By default ``1 - label_smoothing``.
        label_smoothing: the label of all other classes, from 0 to below 1/2.
        mask: bool that broadcasts to ``scores``; False masks a class out.
        ignore_index: the padding id; None without padding.
        reduction: "mean" over rows with at least one unmasked class (0 if there are none), "sum" or
            "none". Rows without positives count.

    Returns:
        The loss in float32, or in float64 from float64 scores.

    Example:
        >>> scores = torch.tensor([[2.0, -1.0, -3.0], [0.0, 1.0, 2.0]])
        >>> zlpr_loss_from_indices(scores, torch.tensor([[0, -100], [2, 1]]), reduction="none")
        tensor([0.4759, 1.1008])
        >>> in_csr = torch.tensor([0, 2, 1]), torch.tensor([0, 1, 3])
        >>> zlpr_loss_from_indices(scores, *in_csr, label_smoothing=0.05)
        tensor(1.3552)

    Reference:
        Su et al., ZLPR: A Novel Loss for Multi-label Classification, 2022, arXiv:2208.02955.
    """
    check_scores(scores)
    check_reduction(reduction)
    check_allowed(mask, scores)
    batch, n = scores.shape[:-1], scores.shape[-1]
    n_rows = batch.numel()
    options = ignore_index, label_smoothing
    listed, offsets, _ = check_lists(scores, n, positives, offsets, values, *options, "scores")
    if values is None and not label_smoothing:
        # For labels 0 and 1 the lists need no sort.
        if ignore_index is not None and ignore_index >= 0:
            listed = listed.masked_fill(listed == ignore_index, -1)
        classes, rows, starts, labels = listed, None, offsets, None
    else:
        values = None if values is None else values.reshape(listed.shape)
        lists = sorted_lists(listed, offsets, values, n_rows, n, *options)
        classes, rows, starts, labels = lists.flat()
    if in_functorch() or (labels is not None and labels.requires_grad):
        given = _lists(classes, rows, starts)
        target = reference.dense_target(
            scores.reshape(n_rows, n), None, given, labels, label_smoothing
        )
        return _reference_loss(scores, target.reshape(scores.shape), mask, reduction)
    operands = scores, None, classes, rows, starts, labels, mask
    return fused_loss(_ENGINE, operands, (float(label_smoothing),), reduction)[0]


def _reference_loss(scores: Tensor, target: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """In torch operations: for targets that need a gradient, and transforms of ``torch.func``."""
    mask = None if mask is None else mask.expand(scores.shape)
    losses, _, counts = reference.losses_of(scores, target, mask)
    return reduced(losses, None if mask is None else counts, reduction)


class _ZLPR(LabelEngine):
    """Operands: scores; a dense target, or classes, rows, starts and values of lists; a mask.

    Lists have the format of the kernels. Forward keeps four numbers per row, from which backward
    computes the gradient.
    """

    name = "zlpr_loss"
    schema = "float label_smoothing"
    n_constants = 6
    kept = tuple(range(7))
    statistics_per_row = 4

    def losses(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor]:
        result: tuple[Tensor, Tensor, Tensor] = kernels.zlpr.forward("auto", *_arguments(call))
        return result

    def gradient(self, call: Call, pieces: Sequence[Any], factor: Tensor) -> Tensor:
        gradient: Tensor = kernels.zlpr.backward("auto", *_arguments(call), pieces[0], factor)
        return gradient

    def slope(self, call: Call) -> Tensor:
        rows, target, lists, values, mask, smoothing = _arguments(call)
        target = reference.dense_target(rows, target, lists, values, smoothing)
        return reference.gradient(rows, target, mask)


_ENGINE = _ZLPR()


def _arguments(call: Call) -> tuple[Any, ...]:
    scores, target, *lists, values, mask = as_rows(call.operands)
    return scores, target, _lists(*lists), values, mask, *call.options


def _lists(*lists: Tensor | None) -> list[Tensor]:
    return [each for each in lists if each is not None]


def zlpr_probability(scores: Tensor) -> Tensor:
    r"""Soft labels from scores trained with :func:`lastlayer.zlpr_loss`: :math:`\sigma(2s)`.

    **For soft labels** these are the learned labels: each term of the gradient is 0 for
    :math:`t_i e^{-s_i} = (1 - t_i) e^{s_i}`, that is :math:`t_i = \sigma(2 s_i)`, whatever the
    other classes are.

    **For hard labels, 0 and 1, it is not a probability.** The minimum of the expected loss then
    depends on which labels occur together, and no function of one score gives the frequency of a
    label. With one class the probability is :math:`\sigma(s)`; with independent labels it is
    between that and :math:`\sigma(2s)`; if exactly one of four labels is right, with probabilities
    (.5, .3, .15, .05), :math:`\sigma(2s)` is (.61, .26, .09, .01). Even ``s > 0`` and ``p > 0.5``
    may differ for correlated labels. :class:`lastlayer.ZLPRCalibrator` fits probabilities and
    thresholds to held-out data.

    Args:
        scores: any floating dtype and shape.

    Returns:
        ``sigmoid(2 * scores)``, in the dtype of the scores.

    Example:
        >>> zlpr_probability(torch.tensor([0.0, 1.0]))
        tensor([0.5000, 0.8808])

    Reference:
        Su, spaces.ac.cn/archives/9064.
    """
    check_scores(scores, at_least_1d=False)
    # A doubled score may overflow float16 to infinity, whose sigmoid is the right result.
    doubled = 2.0 * scores
    return torch.sigmoid(doubled) if doubled.requires_grad else doubled.sigmoid_()


class ZLPRLoss(LossModule):
    """:func:`lastlayer.zlpr_loss` as a module.

    Args:
        reduction: "mean", "sum" or "none".

    Example:
        >>> ZLPRLoss()(torch.zeros(2, 3), torch.eye(3)[:2])
        tensor(1.7918)
    """

    def __init__(self, *, reduction: str = "mean") -> None:
        super().__init__(reduction)

    def forward(self, scores: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        return zlpr_loss(scores, target, mask=mask, reduction=self.reduction)
