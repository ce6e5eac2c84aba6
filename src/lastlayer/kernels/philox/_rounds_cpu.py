"""Philox-4x32-10 for the CPU kernels: 32-bit words in uint64."""

import numpy as np
from numba import njit

_WORD, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LEFT, _RIGHT = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_LEFT, _STEP_RIGHT = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit(nogil=True, inline="always")
def philox(block, seed, step):
    """Four words of a block; all three arguments are uint64."""
    a, b = block & _WORD, block >> _HALF
    c, d = step & _WORD, step >> _HALF
    k, m = seed & _WORD, seed >> _HALF
    for _ in range(10):
        left, right = a * _LEFT, c * _RIGHT
        a, b, c, d = (right >> _HALF) ^ b ^ k, right & _WORD, (left >> _HALF) ^ d ^ m, left & _WORD
        k, m = (k + _STEP_LEFT) & _WORD, (m + _STEP_RIGHT) & _WORD
    return a, b, c, d
