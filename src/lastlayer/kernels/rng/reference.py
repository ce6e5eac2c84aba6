"""Random words, integers, log-uniform ids and draws from an alias table in plain torch.

Philox-4x32-10 on tensors has 32-bit words in int64, whose products wrap like unsigned ones.
"""

import math

import torch
from torch import Tensor

from lastlayer.kernels.rng import SERIES, SQRT_2

_WORD = 0xFFFFFFFF
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four random words from a counter of four words and a key of two."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = _high(right) ^ b ^ k, right & _WORD, _high(left) ^ d ^ m, left & _WORD
        k, m = (k + _STEPS[0]) & _WORD, (m + _STEPS[1]) & _WORD
    return a, b, c, d


def _high(value: Tensor) -> Tensor:
    """The upper 32 bits."""
    return (value >> 32) & _WORD


def _pairs(counter: Tensor, n: int) -> Tensor:
    """Words ``(n, 2)``: the four words of block i are draws 2i and 2i + 1."""
    block = torch.arange((n + 1) // 2, device=counter.device)
    seed, step = counter[0], counter[1]
    place = (
        block & _WORD,
        _high(block),
        (step & _WORD).expand_as(block),
        _high(step).expand_as(block),
    )
    made = torch.stack(philox(place, (seed & _WORD, _high(seed))), 1)
    return made.view(-1, 2)[:n]


def words(counter: Tensor, n: int) -> Tensor:
    """Two words of 32 random bits for each of ``n`` draws, int64 ``(n, 2)``.

    Args:
        counter: seed and step, int64 ``(2,)``.
        n: number of draws; the first draws do not depend on it.
    """
    return _pairs(counter, n)


def integers(counter: Tensor, n: int, below: int) -> Tensor:
    """``n`` integers in [0, below), below at most 2^31: ⌊below · r / 2^64⌋ of 64 random bits r."""
    made = _pairs(counter, n)
    # Both products have less than 64 bits.
    return (made[:, 0] * below + (made[:, 1] * below >> 32)) >> 32


def log_uniform(
    counter: Tensor, order: Tensor | None, n: int, n_classes: int
) -> tuple[Tensor, Tensor]:
    """⌊(n_classes + 1)^u⌋ − 1 for ``n`` uniform u in [0, 1), and their log-probabilities.

    The power is 2^octave, which is exact, times 2^x.

    ``counter`` has seed and step; ``order`` has the class of each rank, None if they are the same.
    Classes are int64. The log-probability of rank k is
    log(log((k + 2) / (k + 1)) / log(n_classes + 1)).
    """
    made = _pairs(counter, n)
    chance = ((made[:, 0] << 21) | (made[:, 1] >> 11)).double() * 2.0**-53
    exponent = chance * math.log2(n_classes + 1)
    octave = exponent.floor()
    place = exponent - octave - 0.5
    power = torch.full_like(place, SERIES[0])
    for coefficient in SERIES[1:]:
        power = power * place + coefficient
    scale = torch.ones_like(made[:, 0]) << octave.long()
    rank = ((power * SQRT_2 * scale.double()).long() - 1).clamp(0, n_classes - 1)
    log_prob = (torch.log1p(1.0 / (rank + 1).double()) / math.log1p(n_classes)).log()
    return (rank if order is None else order[rank]), log_prob.float()


def log_uniform_share(
    target: Tensor, rank: Tensor | None, n_classes: int, complement: bool, wide: bool
) -> Tensor:
    """log q(y) of classes under :func:`log_uniform`, or log(1 − q(y)) with ``complement``.

    ``rank`` has the rank of each class, None if they are the same. The result is 0 for negative
    targets. It is float64 if ``wide``, else float32.
    """
    known = target.clamp(min=0)
    known = known if rank is None else rank[known]
    share = torch.log1p(1.0 / (known + 1).double()) / math.log1p(n_classes)
    made = torch.where(target < 0, 0.0, torch.log1p(-share) if complement else share.log())
    return made if wide else made.float()


def draw(table: Tensor, weight: Tensor, counter: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """``n`` draws with replacement, int64 ``(n,)``, and their log-probabilities in float32.

    Args:
        table: 2^b columns, int64: the alias in the upper half, the threshold in the lower.
        weight: weight of each class, int64 ``(n_classes,)``; the sum is 2^(b + 32).
        counter: seed and step, int64 ``(2,)``.
        n: number of draws.
    """
    bits = len(table).bit_length() - 1
    words = _pairs(counter, n)
    column = words[:, 0] >> (32 - bits)
    entry = table[column]
    ids = torch.where(words[:, 1] < (entry & _WORD), column, entry >> 32)
    log_prob = weight[ids].double().log() - (bits + 32) * math.log(2.0)
    return ids, log_prob.float()


def log_complement(weight: Tensor, target: Tensor, bits: int, wide: bool) -> Tensor:
    """log(1 − w / 2^bits) of classes: the log-probability that a draw is another class.

    The difference is taken in integers, so nothing cancels if the target has nearly all of the
    probability.

    The weights sum to 2^bits, bits at most 63. The result is 0 for negative targets. It is float64
    if ``wide``, else float32.
    """
    own = torch.where(target < 0, 0, weight[target.clamp(min=0)])
    # 2^63 itself does not fit int64.
    others = ((1 << bits) - 1 - own).double() + 1.0
    made = others.log() - bits * math.log(2.0)
    return made if wide else made.float()
