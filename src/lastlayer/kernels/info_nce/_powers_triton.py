"""Exponentials as powers of 2, which is what the hardware has."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The largest S for which all powers from -S to S can have one origin, see below.
LARGEST = tl.constexpr(103.0)
# The most that the smallest of them may be below it.
DEPTH = tl.constexpr(110.0)


@triton.jit
def common_origin(largest):
    """What is taken from similarities in [-S, S] before they become powers.

    It is S, so that a perfect pair has a power of exactly 1. Where the smallest would then be less
    than a normal float32, all are raised by a whole number, with room left for sums of millions.
    """
    return largest - tl.ceil(tl.maximum(2.0 * largest - DEPTH, 0.0))
