"""Rows of scores to cross entropy, and in place to its gradient. README.md has the formulas.

Options are those of :func:`lastlayer.fused.linear_cross_entropy`: ``softcap`` and ``smoothing``
count where they are not 0. The score of the target comes once more in full precision where the one
among ``scores`` is rounded. ``gradient_`` is for where all classes of a row are never held
together, and its normaliser is known.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# The rank of a target of -inf, or in a row with a NaN: beyond any k.
NO_RANK = 1 << 62


def _fake(scores: Tensor, target: Tensor, *options: object) -> tuple[Tensor, ...]:
    loss = scores.new_empty(target.shape, dtype=accumulation_dtype(scores.dtype))
    kept = target.shape if options[-1] else (0,)
    return loss, torch.empty_like(loss), *(each.new_empty(kept) for each in (loss, target, target))


forward_ = operation("softmax_rows.forward_", "softmax_rows_", _fake, ("scores",))
gradient_ = operation("softmax_rows.gradient_", "softmax_gradient_", writes=("scores",))
