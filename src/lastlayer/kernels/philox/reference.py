"""Random words, integers and log-uniform ids in plain torch: defines the truth."""

import math

import torch
from torch import Tensor

from lastlayer.kernels.philox._exp2 import SERIES, SQRT_2
from lastlayer.kernels.philox._rounds import pairs


def words(counter: Tensor, n: int) -> Tensor:
    """Two words of 32 random bits for each of ``n`` draws, int64 ``(n, 2)``.

    Args:
        counter: seed and step, int64 ``(2,)``.
        n: how many draws; the first ones do not depend on it.
    """
    return pairs(counter, n)


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    """``n`` integers from 0 to ``below`` - 1, at most 2^31: ⌊below · r / 2^64⌋ of 64 bits r."""
    made = pairs(counter, n)
    # Both products have less than 64 bits.
    return (made[:, 0] * below + (made[:, 1] * below >> 32)) >> 32


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    """⌊(n_classes + 1)^u⌋ − 1 for ``n`` numbers u from 0 up to 1, and their log-probabilities.

    The power is made of its octave, which is exact, and of 2^x within it.

    Args:
        counter: seed and step, int64 ``(2,)``.
        order: the class of each rank, int64 ``(n_classes,)``; None where they are the same.
        n: how many.
        n_classes: how many classes there are.

    Returns:
        int64 ``(n,)``, and log(log((k + 2) / (k + 1)) / log(n_classes + 1)) in float32.
    """
    made = pairs(counter, n)
    chance = ((made[:, 0] << 21) | (made[:, 1] >> 11)).double() * 2.0**-53
    exponent = chance * math.log2(n_classes + 1)
    octave = exponent.floor()
    place = exponent - octave - 0.5
    power = torch.full_like(place, SERIES[0])
    for coefficient in SERIES[1:]:
        power = power * place + coefficient
    scale = torch.ones_like(made[:, 0]) << octave.long()
    rank = ((power * SQRT_2 * scale.double()).long() - 1).clamp(0, n_classes - 1)
    log_prob = (torch.log1p(1.0 / (rank + 1.0).double()) / math.log1p(n_classes)).log()
    return (rank if order is None else order[rank]), log_prob.float()
