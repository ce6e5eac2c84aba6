"""From the arguments of a fused loss to its results."""

from torch import Tensor

from lastlayer.fused._checks import make_problem
from lastlayer.fused._loss import Loss, linear_loss


def fused_loss(
    loss: Loss,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int | None,
    reduction: str,
    class_weight: Tensor | None,
    row_weight: Tensor | None,
    weight_grad: Tensor | None,
    chunk_rows: int | str,
) -> tuple[Tensor, ...]:
    """The loss, and what else it leaves of each row, in the shape of the target."""
    problem = make_problem(
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
    results = linear_loss(loss, problem, row_weight, reduction, weight_grad)
    return tuple(each.reshape(target.shape) if each.dim() else each for each in results)
