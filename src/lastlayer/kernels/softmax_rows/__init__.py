"""Rows of scores to cross entropy, and in place to its gradient. README.md has the formulas.

Options are those of :func:`lastlayer.fused.linear_cross_entropy`: ``softcap`` and ``smoothing``
count where they are not 0, ``top_k`` where statistics are wanted. The score of the target comes
once more in full precision, since the one among ``scores`` may be rounded.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation

# The rank of a target of -inf, or in a row with a NaN: beyond any k.
NO_RANK = 1 << 62


def _fake(scores: Tensor, target: Tensor, *_: object) -> tuple[Tensor, ...]:
    dtype = accumulation_dtype(scores.dtype)
    loss = scores.new_empty(target.shape, dtype=dtype)
    return (
        loss,
        torch.empty_like(loss),
        torch.empty_like(loss),
        *(torch.empty_like(target) for _ in range(2)),
    )


forward_ = Operation(
    "softmax_rows_",
    "(Tensor(a!) scores, Tensor target, Tensor target_scores, Tensor? row_scale, "
    "Tensor? class_weight, float smoothing, float z_loss, float softcap, float temperature, "
    "bool statistics) -> (Tensor loss, Tensor lse, Tensor entropy, Tensor argmax, Tensor rank)",
    __name__,
    "forward_",
    _fake,
)
