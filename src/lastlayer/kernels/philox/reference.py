"""Random words and log-uniform ids in plain torch: defines the truth."""

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


def log_uniform(counter: Tensor, n: int, n_classes: int) -> Tensor:
    """⌊(n_classes + 1)^u⌋ − 1 for ``n`` numbers u from 0 up to 1, int64 ``(n,)``.

    The power is made of its octave, which is exact, and of 2^x within it.
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
    ids = (power * SQRT_2 * scale.double()).long() - 1
    return ids.clamp(0, n_classes - 1)
