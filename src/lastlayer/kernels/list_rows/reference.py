"""The loss of listed classes in plain torch: defines the truth."""

import math

from torch import Tensor

from lastlayer.kernels import entmax
from lastlayer.kernels.list_rows._finish import loss_and_gradient


def forward(
    scores: Tensor,
    classes: Tensor,
    target: Tensor,
    target_scores: Tensor,
    row_scale: Tensor | None,
    class_weight: Tensor | None,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``<p - y, scores> + H(p)`` of each row times the weight of its target, and its gradient.

    Args:
        scores: float32 or float64 ``(rows, k)``, of the listed classes.
        classes: int64 ``(rows, k)``, -1 for none.
        target: int64 ``(rows,)``.
        target_scores: ``(rows,)``.
        row_scale: ``(rows,)``, what the gradient is multiplied by; None where none is wanted.
        class_weight: ``(v,)`` or None.
        alpha: at least 1.

    Returns:
        The losses ``(rows,)``, and the gradient of the scores as values and classes ``(rows, k +
        1)``, the target last and 0 for padding; both are empty without ``row_scale``. A row without
        any probability costs +inf and has no gradient.
    """
    listed = scores.masked_fill(classes < 0, -math.inf)
    probs = entmax.forward("reference", listed, alpha, None)
    return loss_and_gradient(
        probs, listed, classes, target, target_scores, row_scale, class_weight, alpha
    )
