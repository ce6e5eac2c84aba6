"""The loss of top-k softmax from hidden states and class vectors."""

from torch import Tensor

from lastlayer._checks import check_k
from lastlayer.fused._call import fused_loss
from lastlayer.fused._loss import Loss
from lastlayer.fused._sparse_rows import PIECES


def linear_topk_softmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    k: int,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    chunk_rows: int | str = "auto",
    weight_grad: Tensor | None = None,
) -> Tensor:
    r"""``topk_softmax_loss(hidden @ weight.T + bias, target, k)`` without the matrix of scores.

    Only the k best classes and the target have a gradient. Up to k = 512 the products of the
    backward pass are sums over lists of k + 1 classes a row; beyond that they are dense.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row a class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        k: how many classes are in the running, at least 1; v or more is the cross entropy.
        ignore_index: rows with this target are left out; None where there are none.
        reduction: "mean" over the rows that count, by their weights; "sum" or "none".
        class_weight: one weight a class, ``(v,)``.
        row_weight: one weight a row, ``(*batch)``.
        chunk_rows: rows of scores held at a time, "auto" or "low".
        weight_grad: a tensor to which backward adds the gradient of the weight, as in
            :func:`linear_cross_entropy`.

    Returns:
        The loss in float32, or in float64 from float64.

    Example:
        >>> import torch
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-1.0]])
        >>> linear_topk_softmax_loss(hidden, weight, torch.tensor([0]), k=2)
        tensor(0.6931)

    Reference:
        Su, spaces.ac.cn/archives/8046 (sparse softmax).
    """
    check_k(k)
    return fused_loss(
        Loss("topk_softmax", (float(k),), copies=1.0 + 1.0 / PIECES),
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
    )[0]
