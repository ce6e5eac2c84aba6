"""Cross entropy, and what else one pass over the scores can tell."""

from typing import NamedTuple

from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.fused._call import fused_loss
from lastlayer.fused._loss import Loss
from lastlayer.fused._options import cross_entropy_options


class Statistics(NamedTuple):
    """What :func:`linear_statistics` returns; all but the loss have the shape of the target.

    Only the loss is differentiable. In rows with an ignored target all entries are 0.
    """

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor
    logsumexp: Tensor
    argmax: Tensor
    in_top_k: Tensor


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    k: int = 5,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_rows: int | str = "auto",
    weight_grad: Tensor | None = None,
) -> Statistics:
    """:func:`linear_cross_entropy`, and what else the same pass over the scores can tell.

    Of each row: the log-probability of the target, the entropy, the logsumexp, the best class, and
    whether the target is among the k best.

    Choose it for accuracy, calibration and z-monitoring in training or validation, and for the
    log-probabilities that policy gradients need. It always works in chunks of rows.

    Cost: that of :func:`linear_cross_entropy`; the numbers are found while scores are read.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row a class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        k: ``in_top_k`` says whether fewer than k classes have a higher score than the target.
        ignore_index: rows with this target are left out; None where there are none.
        reduction: "mean" over the rows that count, by their weights; "sum" or "none".
        label_smoothing: how much of the target is spread evenly over all classes.
        class_weight: one weight a class, ``(v,)``.
        row_weight: one weight a row, ``(*batch)``.
        z_loss: weight of the squared logsumexp.
        softcap: c, bends scores into ``c * tanh(score / c)``.
        temperature: divides the scores. What is returned is after softcap and temperature.
        chunk_rows: rows of scores held at a time, "auto" or "low".
        weight_grad: a tensor to which backward adds the gradient of the weight, as in
            :func:`linear_cross_entropy`.

    Returns:
        :class:`Statistics`.

    Example:
        >>> import torch
        >>> known = linear_statistics(torch.ones(1, 1), torch.eye(3)[:, :1], torch.tensor([0]))
        >>> known.argmax, known.in_top_k, known.log_prob
        (tensor([0]), tensor([True]), tensor([-0.5514]))
    """
    check_k(k)
    options = cross_entropy_options(label_smoothing, z_loss, softcap, temperature)
    loss, lse, log_prob, entropy, argmax, rank = fused_loss(
        Loss("cross_entropy", options, statistics=(3, 2)),
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        reduction=reduction,
        class_weight=class_weight,
        row_weight=row_weight,
        weight_grad=weight_grad,
        chunk_rows=chunk_rows,
    )
    in_top_k = rank < k
    if ignore_index is not None:
        in_top_k = in_top_k & (target != ignore_index)
    return Statistics(loss, log_prob, entropy, lse, argmax, in_top_k)
