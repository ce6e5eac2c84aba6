"""Tsallis' entropies inside a Triton program."""

import triton
import triton.language as tl

from lastlayer.kernels._triton import expm1


def entropy_kind(alpha: float) -> int:
    """What :func:`entropy_and_slope` calls this alpha."""
    return {2.0: 1, 1.5: 2, 1.0: 3}.get(alpha, 0)


@triton.jit
def entropy_and_slope(shares, alpha, KIND: tl.constexpr):
    """The entropy of each class, and its derivative by the probability."""
    if KIND == 1:
        return 0.5 * shares * (1.0 - shares), 0.5 - shares
    elif KIND == 2:
        root = tl.sqrt(shares)
        return (4.0 / 3.0) * shares * (1.0 - root), (4.0 / 3.0) - 2.0 * root
    else:
        logs = tl.log(tl.where(shares > 0.0, shares, 1.0))
        if KIND == 3:
            return -shares * logs, -logs - 1.0
        else:
            excess = alpha - 1.0
            fall = expm1(excess * logs)
            factor = 1.0 / (alpha * excess)
            return -shares * fall * factor, -(alpha * fall + excess) * factor
