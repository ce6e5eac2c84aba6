"""Cross entropy of rows of scores, and in place its gradient. README.md has the formulas.

Options are those of :func:`lastlayer.fused.linear_cross_entropy`; a ``softcap`` or ``smoothing`` of
0 means none. If ``scores`` are rounded, the score of the target can be given a second time in full
precision. ``reduced_`` is for small problems: one launch for the loss and the gradient of the mean,
with ignored rows. ``gradient_`` is for slabs of classes of rows whose normaliser is known.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# Rank of a target with score -inf, or in a row with a NaN: above any k.
NO_RANK = 1 << 62


def _fake(scores: Tensor, target: Tensor, *options: object) -> tuple[Tensor, ...]:
    loss = scores.new_empty(target.shape, dtype=accumulation_dtype(scores.dtype))
    kept = target.shape if options[-1] else (0,)
    return loss, torch.empty_like(loss), *(each.new_empty(kept) for each in (loss, target, target))


def _fake_reduced(scores: Tensor, hidden: Tensor, *_: object) -> tuple[Tensor, ...]:
    loss = scores.new_empty(scores.shape[:1], dtype=accumulation_dtype(scores.dtype))
    return loss, torch.empty_like(hidden, memory_format=torch.contiguous_format)


forward_ = operation("softmax_rows.forward_", "softmax_rows_", _fake, ("scores",))
reduced_ = operation(
    "softmax_rows.reduced_", "reduced_softmax_rows_", _fake_reduced, ("scores",), has_cpu=False
)
gradient_ = operation("softmax_rows.gradient_", "softmax_gradient_", writes=("scores",))
