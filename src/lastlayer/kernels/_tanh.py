"""The hyperbolic tangent inside a Triton program: Triton has none that every version shares."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """From exp(-2|x|), which cannot overflow as exp(2x) does."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0.0, -size, size)
