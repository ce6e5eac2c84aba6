"""Predictions from scores: the best classes, samples and log-probabilities.

Scores ``(n, classes)`` are the output of a matrix product. All operations first add the bias, apply
the soft cap ``c * tanh(score / c)`` (0 for none), and divide by the temperature. ``best`` returns
the k largest values with their classes, ties by ascending class, and the logsumexp of each row.
``draw`` returns one class per uniform number in [0, 1). ``log_softmax_`` overwrites the scores with
log-probabilities plus an optional ``offset`` per row; ``log_sigmoid_`` with the log-probabilities
of independent labels.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer.kernels._registry import operation

# Largest k for which callers use the CPU and CUDA kernels of ``best``.
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
