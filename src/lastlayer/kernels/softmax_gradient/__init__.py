"""Scores of some classes, in place, to the gradient of a cross entropy whose normaliser is known.

For each row i and class j ``push_i * exp(s_ij - lse_i) * slope_ij``, and ``true_i`` at its target,
where s are the capped and tempered scores and slope their derivative by the plain ones. A target
of -1 is not among the classes. For where all classes of a row are never held together.
"""

from lastlayer.kernels._registry import Operation


def _fake(*_: object) -> None:
    return None


forward_ = Operation(
    "softmax_gradient_",
    "(Tensor(a!) scores, Tensor target, Tensor true, Tensor lse, Tensor push, float softcap, "
    "float temperature) -> ()",
    __name__,
    "forward_",
    _fake,
)
