"""Probabilities of rows to the Fenchel-Young loss of entmax, and in place to its gradient.

``alpha`` 1 takes Shannon's entropy, as softmax over all or the k largest scores does.
"""

from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation


def _fake(probs: Tensor, _scores: Tensor, target: Tensor, *_: object) -> Tensor:
    dtype = accumulation_dtype(probs.dtype)
    return probs.new_empty(target.shape, dtype=dtype)


forward_ = Operation(
    "entmax_rows_",
    "(Tensor(a!) probs, Tensor scores, Tensor target, Tensor? row_scale, float alpha) -> Tensor",
    __name__,
    "forward_",
    _fake,
)
