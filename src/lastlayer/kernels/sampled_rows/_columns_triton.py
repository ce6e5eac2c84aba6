"""What the Triton kernels make of columns: which of them count, their logits, and softplus."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _counts(column, m, offset, ids, target, p, HITS: tl.constexpr):
    """What is added to each column, and which of them count."""
    live = column < m
    added = tl.load(offset + column, mask=live, other=-float("inf")).to(tl.float32)
    keep = added > -float("inf")
    if HITS:
        named = tl.load(ids + column, mask=live, other=-1)
        for place in range(p):
            keep = keep & (named != tl.load(target + place))
    return added, keep


@triton.jit
def _logits(scores, column, m, added, keep, n_exact, factor, move):
    values = tl.load(scores + column, mask=column < m, other=0.0).to(tl.float32)
    values = values * factor + added + tl.where(column >= n_exact, move, 0.0)
    return tl.where(keep, values, -float("inf"))


@triton.jit
def _softplus(values):
    """log(1 + e^x) and its slope, without overflow."""
    small = tl.exp2(-tl.abs(values) * LOG2E)
    above = 1.0 + small
    # Rounding in 1 + e is made up for, so that many small terms do not add up to nothing.
    step = above - 1.0
    log = tl.where(step == 0.0, small, tl.log(above) * (small / tl.where(step == 0.0, 1.0, step)))
    slope = tl.where(values >= 0.0, 1.0, small) / above
    return log + tl.maximum(values, 0.0), tl.where(values == values, slope, values)
