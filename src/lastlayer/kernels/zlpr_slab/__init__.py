"""Scores of some of the labels of a multi-label loss: their sums for ZLPR, and its gradient.

All labels of a row are never held together, so there are two steps. ``sums`` leaves of each row
the logsumexp of its scores, and of minus its scores where labels are smoothed. Once these are known
of all labels, ``gradient_`` turns scores, in place, into ``scale_i * (exp(s_ij - above_i) -
exp(-s_ij - below_i))``, the second part only where ``below`` is given.

A score of -inf counts for nothing and has the gradient 0: so are the listed labels left out.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation


def _fake_sums(scores: Tensor, negated: bool) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(scores.dtype)
    n = scores.shape[0]
    return scores.new_empty(n, dtype=dtype), scores.new_empty(n if negated else 0, dtype=dtype)


def _fake_gradient(*_: object) -> None:
    return None


sums = Operation(
    "zlpr_slab_sums",
    "(Tensor scores, bool negated) -> (Tensor, Tensor)",
    __name__,
    "sums",
    _fake_sums,
)
gradient_ = Operation(
    "zlpr_slab_gradient_",
    "(Tensor(a!) scores, Tensor scale, Tensor above, Tensor? below) -> ()",
    __name__,
    "gradient_",
    _fake_gradient,
)
