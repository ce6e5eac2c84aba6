"""Philox-4x32-10 on tensors: 32-bit words in int64, whose products wrap as unsigned ones do."""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
FACTORS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Four words from a counter of four and a key of two."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        left, right = a * FACTORS[0], c * FACTORS[1]
        a, b, c, d = high(right) ^ b ^ k, right & WORD, high(left) ^ d ^ m, left & WORD
        k, m = (k + STEPS[0]) & WORD, (m + STEPS[1]) & WORD
    return a, b, c, d


def high(value: Tensor) -> Tensor:
    """The upper 32 bits."""
    return (value >> 32) & WORD


def pairs(counter: Tensor, n: int) -> Tensor:
    """``(n, 2)`` words: those of block i are the draws 2i and 2i + 1."""
    block = torch.arange((n + 1) // 2, device=counter.device)
    seed, step = counter[0], counter[1]
    place = (block & WORD, high(block), (step & WORD).expand_as(block), high(step).expand_as(block))
    made = torch.stack(philox(place, (seed & WORD, high(seed))), 1)
    return made.view(-1, 2)[:n]
