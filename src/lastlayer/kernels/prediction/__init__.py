"""What a softmax over scores predicts: the best classes, draws and log-probabilities.

Scores ``(n, classes)`` are those of a linear layer without what comes after the product: a bias,
then a soft cap c, ``c * tanh(score / c)`` (0 for none), then a division by the temperature.
``best`` gives the largest k with their classes, of equal ones the lower class first, and the
logsumexp of each row; ``draw`` a class for each number in [0, 1); ``log_softmax_`` overwrites the
scores with log-probabilities, to which it adds an ``offset`` of each row; ``log_sigmoid_`` with
those of labels that do not exclude each other.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation

# On CPU and CUDA there is a kernel for up to so many best classes.
MOST_BEST = 128


def _best(scores: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    n, k = scores.shape[0], rest[3]
    values = scores.new_empty(n, k)
    return values, scores.new_empty(n, k, dtype=torch.int64), scores.new_empty(n)


def _draw(scores: Tensor, *rest: Any) -> Tensor:
    return scores.new_empty(rest[3].shape, dtype=torch.int64)


best = operation("prediction.best", "best_classes", _best)
draw = operation("prediction.draw", "draw_classes", _draw)
log_softmax_ = operation(
    "prediction.log_softmax_", "log_softmax_", writes=("scores",), has_cpu=False
)
log_sigmoid_ = operation(
    "prediction.log_sigmoid_", "log_sigmoid_", writes=("scores",), has_cpu=False
)
