"""Scores of some of the labels of a logistic (binary cross entropy) loss: losses and gradient.

Each score counts ``softplus(s) - smoothing * s``, whose gradient is ``sigmoid(s) - smoothing``;
scores become the gradient, in place, where a factor is given for each row. A score of -inf counts
for nothing and has the gradient 0: so are the listed labels left out.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation


def _fake(scores: Tensor, *_: object) -> Tensor:
    dtype = accumulation_dtype(scores.dtype)
    return scores.new_empty(scores.shape[0], dtype=dtype)


forward_ = Operation(
    "logistic_slab_",
    "(Tensor(a!) scores, Tensor? scale, float smoothing) -> Tensor",
    __name__,
    "forward_",
    _fake,
)
