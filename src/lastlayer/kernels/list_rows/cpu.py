"""On a CPU: Numba solves for the probabilities, which are few; torch does the rest."""

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
    """As the reference's."""
    listed = scores.masked_fill(classes < 0, -math.inf)
    probs = entmax.forward("cpu", listed, alpha, None)
    return loss_and_gradient(
        probs, listed, classes, target, target_scores, row_scale, class_weight, alpha
    )
