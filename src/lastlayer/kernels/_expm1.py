"""exp(x) - 1 inside a Triton program: Triton has none that every version shares."""

import triton
import triton.language as tl


@triton.jit
def expm1(x):
    """For x up to 0.1: a series near 0, where exp(x) - 1 would cancel."""
    near = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * 0.008333334))))
    return tl.where(x > -0.1, near, tl.exp(x) - 1.0)
