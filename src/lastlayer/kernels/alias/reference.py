"""Draws from an alias table in plain torch: defines the truth."""

import math

import torch
from torch import Tensor

from lastlayer.kernels.philox._rounds import WORD, pairs


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """``n`` draws with replacement, int64 ``(n,)``, and their log-probabilities in float32.

    Args:
        table: 2^b columns, int64: the alias in the upper half, the threshold in the lower.
        weight: of each class, int64 ``(n_classes,)``; they sum to 2^(b + 32).
        counter: seed and step, int64 ``(2,)``.
        n: how many.
    """
    bits = len(table).bit_length() - 1
    words = pairs(counter, n)
    column = words[:, 0] >> (32 - bits)
    entry = table[column]
    ids = torch.where(words[:, 1] < (entry & WORD), column, entry >> 32)
    log_prob = weight[ids].double().log() - (bits + 32) * math.log(2.0)
    return ids, log_prob.float()


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    """log(1 − w / 2^bits) of classes: how probable it is that a draw is another one.

    In integers: nothing is cancelled where the target has nearly all of the probability.

    Args:
        weight: of each class, int64 ``(n_classes,)``.
        target: classes, int64, of any shape; 0 for a negative one, which is none.
        bits: the logarithm of what all weights sum to, at most 63.
        wide: in float64 instead of float32.
    """
    own = torch.where(target < 0, 0, weight[target.clamp(min=0)])
    # 2^63 itself is no int64.
    others = ((1 << bits) - 1 - own).double() + 1.0
    made = others.log() - bits * math.log(2.0)
    return made if wide else made.float()
