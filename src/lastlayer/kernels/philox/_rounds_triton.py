"""Philox-4x32-10 for the Triton kernels: 32-bit words in uint64, whose products are exact."""

import triton
import triton.language as tl

WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def philox(block, seed, step):
    """Four words of each block; all three arguments are int64."""
    block, seed, step = block.to(tl.uint64), seed.to(tl.uint64), step.to(tl.uint64)
    a, b = block & WORD, block >> 32
    c, d = (step & WORD) + 0 * block, (step >> 32) + 0 * block
    k, m = seed & WORD, seed >> 32
    for _ in tl.static_range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (right >> 32) ^ b ^ k, right & WORD, (left >> 32) ^ d ^ m, left & WORD
        k, m = (k + 0x9E3779B9) & WORD, (m + 0xBB67AE85) & WORD
    return a, b, c, d
