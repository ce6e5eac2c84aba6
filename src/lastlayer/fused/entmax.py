"""The loss of entmax from hidden states and class vectors."""

from torch import Tensor

from lastlayer._checks import check_alpha
from lastlayer.fused._call import fused_loss
from lastlayer.fused._loss import Loss
from lastlayer.fused._sparse_rows import PIECES
from lastlayer.fused.cross_entropy import linear_cross_entropy


def linear_entmax_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    alpha: float = 1.5,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    class_weight: Tensor | None = None,
    row_weight: Tensor | None = None,
    chunk_rows: int | str = "auto",
    weight_grad: Tensor | None = None,
) -> Tensor:
    r"""``entmax_loss(hidden @ weight.T + bias, target, alpha)`` without the matrix of scores.

    alpha = 2 is the loss of sparsemax, alpha = 1 the cross entropy.

    Its gradient has non-zeros for the support and the target alone. Where the supports of a chunk
    have 128 classes or fewer, as they do once a model has learnt something, both products of the
    backward pass become sums over short lists, and class vectors outside every support are not
    touched: a step then costs one product instead of three. Flat rows take dense products.

    On a GPU the host waits once a chunk, to see which of the two it is.

    Args:
        hidden: ``(*batch, d)``.
        weight: ``(v, d)``, one row a class.
        target: class ids ``(*batch)``, int64.
        bias: ``(v,)``.
        alpha: a number of at least 1.
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
        >>> hidden, weight = torch.ones(1, 1), torch.tensor([[3.0], [0.0], [0.0]])
        >>> linear_entmax_loss(hidden, weight, torch.tensor([0]), alpha=2.0)
        tensor(0.)

    Reference:
        Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019,
        arXiv:1905.05702.
    """
    if not isinstance(alpha, (int, float)):
        raise TypeError(
            f"alpha: expected a number, got {type(alpha).__name__}; a learned alpha works with "
            "lastlayer.entmax_loss on scores"
        )
    check_alpha(alpha)
    if alpha == 1.0:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            row_weight=row_weight,
            chunk_rows=chunk_rows,
            weight_grad=weight_grad,
        )
    return fused_loss(
        Loss("entmax", (float(alpha),), copies=1.0 + 1.0 / PIECES),
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
