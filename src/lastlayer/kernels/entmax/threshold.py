"""Solves for the threshold of entmax within a Triton program, by Newton's method.

``KIND`` k > 0 stands for alpha = 1 + 1/k, where a probability is the k-th power of a margin: 1 is
sparsemax, 2 is entmax with alpha 1.5. ``KIND`` 0 is any alpha. ``at`` is the unknown of a row. For
k > 0 it is the threshold tau, approached from below. For kind 0 it is the logarithm of the largest
probability, bracketed by ``low`` and ``high``. A tile is one row (``AXIS`` 0), several rows
(``AXIS`` 1, with one unknown per row), or one row in blocks (``AXIS`` BOTH).

Kernels that use these functions are launched with ``enable_fp_fusion=False``. The loops end
depending on sums, which must be equal in all threads of a program. If the compiler fused products
into the reduction, two threads could round differently, and one would wait forever for the other.
"""

import triton
import triton.language as tl

from lastlayer.kernels._triton import chosen_columns, expm1, next_power_of_2

# How close a sum must be to 1. The first is the rounding error of a sum of float32 probabilities.
# Up to alpha 1.5 the curvature is so low that the last step, on the probabilities, corrects more.
SUM_TOLERANCE, EARLY_TOLERANCE = tl.constexpr(2.5e-7), tl.constexpr(1e-4)
# A safeguard: the bracket of kind 0 closes in far fewer iterations.
MAX_TRIPS = tl.constexpr(120)
BOTH = tl.constexpr(2)
# For a larger k, multiplying k margins takes as long as a power.
HIGHEST_KIND = 8
# Up to this width one program finds the peaks of a row and solves it.
WIDEST_IN_ONE_PROGRAM = 16384
# Alpha to the KIND of entropy_and_slope; 0 for any other alpha.
ENTROPIES = {2.0: 1, 1.5: 2, 1.0: 3}


def kind_of(alpha: float) -> int:
    """The kind of a fixed alpha."""
    power = 1.0 / (alpha - 1.0) if alpha > 1.0 else 0.0
    kind = round(power)
    return kind if kind <= HIGHEST_KIND and abs(power - kind) < 1e-9 else 0


def group_and_warps(n: int, width: int) -> dict[str, int]:
    """Number of chosen blocks that a program loads together, and its number of warps."""
    scores, warps = (256, 1) if n <= 2048 else (512, 2) if n <= 8192 else (1024, 4)
    return dict(GROUP=max(1, scores // width), num_warps=warps)


@triton.jit
def shares(distance, at, excess, KIND: tl.constexpr):
    """Probabilities at the guess ``at``, and their slopes up to a common factor of the row."""
    if KIND == 1:
        probs = tl.maximum(distance - at, 0.0)
        slope = tl.where(distance > at, 1.0, 0.0)
    elif KIND > 1:
        margin = tl.maximum(tl.fma(distance, 1.0 / KIND, -at), 0.0)
        slope = margin
        for _ in tl.static_range(KIND - 2):
            slope = slope * margin
        probs = slope * margin
    else:
        # Without the minimum, 0 * inf would exclude the maximum itself for a very large alpha.
        ratio = distance * (excess * tl.exp(tl.minimum(-excess * at, 50.0)))
        inside = ratio > -1.0
        ratio = tl.where(inside, ratio, 0.0)
        grown = 1.0 + ratio
        inverse = 1.0 / grown
        # log(1 + r), precise for small r, since the rounding error of 1 + r is added back.
        log1p = tl.log(grown) + (ratio - (grown - 1.0)) * inverse
        nearly_softmax = excess < 1e-7
        power = log1p * (1.0 / tl.where(nearly_softmax, 1.0, excess))
        power = tl.where(nearly_softmax, distance, power)
        probs = tl.where(inside, tl.exp(at + power), 0.0)
        slope = probs * inverse
    return probs, slope


@triton.jit
def unsolved_row(peak, KIND: tl.constexpr):
    """The initial ``at`` of a row: the bound that follows from its maximum alone."""
    if KIND == 0:
        return peak * 0.0
    else:
        return peak * 0.0 - 1.0


@triton.jit
def _norm_and_fall(total, weight, KIND: tl.constexpr):
    """The KIND-norm of the margins, and its negated derivative with respect to the threshold."""
    if KIND == 1:
        return total, weight
    elif KIND == 2:
        norm = tl.sqrt(total)
        return norm, weight / norm
    else:
        norm = tl.exp(tl.log(total) * (1.0 / KIND))
        return norm, norm * weight / total


@triton.jit
def leap(at, total, weight, KIND: tl.constexpr):
    """The first step for kinds above 0, which lands near the root, on either side of it.

    If higher scores are rarer, the norm of the margins decays roughly exponentially, so this is
    Newton's method on its logarithm. It saves a pass over the row.
    """
    norm, fall = _norm_and_fall(total, weight, KIND)
    near = (norm > 1.001) & (norm < 4.0)
    step = tl.where(near, tl.log(norm) * norm, norm - 1.0) / fall
    following = tl.where(near, tl.minimum(at + step, 0.5 * at), at + step)
    go = following > at
    return tl.where(go, following, at), go


@triton.jit
def _tolerance(excess):
    return tl.where(excess <= 0.5, EARLY_TOLERANCE, SUM_TOLERANCE)


@triton.jit
def advance(at, low, high, total, weight, excess, trips, KIND: tl.constexpr):
    """The next guess from the sums of :func:`shares` at ``at``, and whether it differs."""
    if KIND > 0:
        # Newton's method on the KIND-norm of the margins, a convex and decreasing function of the
        # threshold: it approaches the root from below and never passes it.
        norm, fall = _norm_and_fall(total, weight, KIND)
        following = at + (norm - 1.0) / fall
        # The leap may have passed the root. The first step from there leads back below it.
        go = (following > at) | ((following < at) & (trips == 1))
    else:
        low = tl.where(total < 1.0, tl.maximum(low, at), low)
        high = tl.where(total < 1.0, high, tl.minimum(high, at))
        newton = at - tl.log(total) * total / weight
        middle = 0.5 * (low + high)
        inside = (newton > low) & (newton < high) & (trips % 8 != 7)
        following = tl.where(inside, newton, middle)
        unsolved = (tl.abs(total - 1.0) > _tolerance(excess)) & (trips < MAX_TRIPS)
        closed = (following <= low) | (following >= high)
        # A closed bracket returns its upper end, where the whole support is present.
        following = tl.where(closed, high, following)
        go = unsolved & (following != at) & (total > 0.0) & (excess >= 0.0)
    return tl.where(go, following, at), low, high, go


@triton.jit
def per_class(row_values, AXIS: tl.constexpr):
    """Values of each row, in a shape that broadcasts over its classes."""
    if AXIS == 1:
        return row_values[:, None]
    else:
        return row_values


@triton.jit
def row_sum(values, AXIS: tl.constexpr):
    """The sum of each row of a tile."""
    if AXIS == BOTH:
        return tl.sum(tl.sum(values, 1), 0)
    else:
        return tl.sum(values, AXIS)


@triton.jit
def _any(go, AXIS: tl.constexpr):
    if AXIS == 1:
        return tl.max(go.to(tl.int32), 0) > 0
    else:
        return go


@triton.jit
def solve_tile(distance, at, log_n, excess, KIND: tl.constexpr, AXIS: tl.constexpr):
    """The unknown of each row of a tile in registers, and its sums, from a bound ``at``."""
    low = at * 0.0 - log_n
    high = at
    probs, slope = shares(distance, per_class(at, AXIS), per_class(excess, AXIS), KIND)
    total = row_sum(probs, AXIS)
    weight = row_sum(slope, AXIS)
    trips = 0
    at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
    unsolved = _any(go, AXIS)
    while unsolved:
        probs, slope = shares(distance, per_class(at, AXIS), per_class(excess, AXIS), KIND)
        total = row_sum(probs, AXIS)
        weight = row_sum(slope, AXIS)
        trips += 1
        at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
        unsolved = _any(go, AXIS)
    return at, total, weight


@triton.jit
def is_broken(peak, excess, KIND: tl.constexpr):
    """Whether the result of a row is NaN: a score is NaN or +inf, or alpha is below 1 or NaN."""
    broken = peak == float("inf")
    if KIND == 0:
        broken = broken | (excess < 0.0) | (excess != excess)
    return broken


@triton.jit
def solved_tile(distance, at, broken, log_n, excess, KIND: tl.constexpr, AXIS: tl.constexpr):
    """The probabilities of a tile in registers, from a bound ``at``; NaN in broken rows."""
    at, total, weight = solve_tile(distance, at, log_n, excess, KIND, AXIS)
    probs, slope = shares(distance, per_class(at, AXIS), per_class(excess, AXIS), KIND)
    missing = correction(total, weight, broken)
    probs = polished(probs, slope, per_class(missing, AXIS))
    if KIND == 0:
        # For alpha > 2 slopes are steep at the edge of the support, and the step may overshoot.
        reached = row_sum(probs, AXIS)
        reached = tl.where((excess > 1.0) & (reached != 0.0), reached, 1.0)
        probs = probs / per_class(reached, AXIS)
    return probs


@triton.jit
def bound_from_part(distance, peak, log_n, excess, KIND: tl.constexpr):
    """A bound on the unknown of a row, from a part of the row that includes its maximum.

    With fewer classes the same threshold gives a smaller sum, so the threshold of a part is below
    that of the whole row. The slack covers the rounding of both, and the tolerance of the sum,
    which grows at least as fast as the logarithm of the largest probability.
    """
    at, _, _ = solve_tile(distance, unsolved_row(peak, KIND), log_n, excess, KIND, 0)
    if KIND == 0:
        return tl.minimum(at + (1e-6 + 1.01 * _tolerance(excess)), 0.0)
    else:
        return tl.maximum(at - 1e-6, -1.0)


@triton.jit
def correction(total, weight, broken):
    """The correction per slope of :func:`polished`: NaN for a broken row, 0 for an empty one."""
    missing = tl.where(weight > 0.0, (1.0 - total) / weight, 0.0)
    return tl.where(broken, float("nan"), missing)


@triton.jit
def polished(probs, slope, per_slope):
    """A last Newton step on the probabilities, which corrects the rounding of the threshold."""
    return tl.maximum(tl.fma(slope, per_slope, probs), 0.0, propagate_nan=tl.PropagateNan.ALL)


def register_tile(n: int) -> tuple[int, int, int]:
    """Width and rows of a tile that fits in registers, and its number of warps."""
    width = max(16, next_power_of_2(n))
    return width, max(1, 512 // width), max(1, min(8, width // 1024))


@triton.jit
def tile(n_rows, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (a scalar for ``ROWS`` 1) and columns of this program, and which entries exist."""
    column = tl.arange(0, WIDTH)
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        return row, column, column < n
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        return row, column[None, :], (row < n_rows)[:, None] & (column[None, :] < n)


@triton.jit
def below(values, origin, SHRINK: tl.constexpr):
    """Scores less their maximum, at most 0."""
    if SHRINK == 1.0:
        return values - origin
    else:
        return (values - origin) * SHRINK


@triton.jit
def _sums_of_chosen(
    scores, chosen, count, n, origin, at, excess,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, LONG: tl.constexpr,
    SHRINK: tl.constexpr,
):  # fmt: skip
    totals = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    weights = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    lost = tl.zeros((GROUP, WIDTH), dtype=tl.float32)
    # Unrolling overlaps several loads. For short rows the registers cost more than that saves, and
    # unrolled powers take too long to compile.
    UNROLL: tl.constexpr = 4 if KIND > 0 and GROUP * WIDTH > 256 and not LONG else 1
    for first in tl.range(0, count, GROUP, loop_unroll_factor=UNROLL):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        probs, slope = shares(below(values, origin, SHRINK), at, excess, KIND)
        if LONG:
            # Kahan summation: equal scores round in the same direction at each addition, and over
            # a thousand additions the error would be noticeable.
            probs -= lost
            grown = totals + probs
            lost = (grown - totals) - probs
            totals = grown
        else:
            totals += probs
        weights += slope
    return row_sum(totals, BOTH), row_sum(weights, BOTH)


@triton.jit
def solve_chosen(
    scores, chosen, count, n, origin, at, log_n, excess,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, LONG: tl.constexpr,
    SHRINK: tl.constexpr,
):  # fmt: skip
    """As :func:`solve_tile`, for more candidates than fit in registers: each step reads them."""
    low, high = -log_n, at
    total, weight = _sums_of_chosen(
        scores, chosen, count, n, origin, at, excess, WIDTH, GROUP, KIND, LONG, SHRINK
    )
    trips = 0
    if KIND > 0:
        at, go = leap(at, total, weight, KIND)
    else:
        at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
    while go:
        total, weight = _sums_of_chosen(
            scores, chosen, count, n, origin, at, excess, WIDTH, GROUP, KIND, LONG, SHRINK
        )
        trips += 1
        at, low, high, go = advance(at, low, high, total, weight, excess, trips, KIND)
    return at, total, weight


@triton.jit
def entropy_and_slope(probs, alpha, KIND: tl.constexpr):
    """Each class's term of the entropy, and its derivative with respect to the probability."""
    if KIND == 1:
        return 0.5 * probs * (1.0 - probs), 0.5 - probs
    elif KIND == 2:
        root = tl.sqrt(probs)
        return (4.0 / 3.0) * probs * (1.0 - root), (4.0 / 3.0) - 2.0 * root
    else:
        logs = tl.log(tl.where(probs > 0.0, probs, 1.0))
        if KIND == 3:
            return -probs * logs, -logs - 1.0
        else:
            excess = alpha - 1.0
            fall = expm1(excess * logs)
            factor = 1.0 / (alpha * excess)
            return -probs * fall * factor, -(alpha * fall + excess) * factor


@triton.jit
def exp_remainder(x):
    """``(exp(x) - 1 - x) / x**2``, by a series near 0, where this would cancel."""
    near = tl.abs(x) < 0.3
    safe = tl.where(near, 1.0, x)
    series = 1.0 / 362880.0 + x * (1.0 / 3628800.0 + x * (1.0 / 39916800.0))
    series = 1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0 + x * series))
    series = 0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * series)))
    return tl.where(near, series, (tl.exp(x) - 1.0 - x) / (safe * safe))


@triton.jit
def alpha_terms(p, g, mean, excess):
    """Each class's terms of three sums for the gradient of alpha; README.md has the formula."""
    logs = tl.log(tl.where(p != 0.0, p, 1.0))
    square = logs * logs * exp_remainder(-excess * logs)
    # The derivatives of a row sum to 0, so the mean can be subtracted, which avoids cancellation.
    u = tl.where(p != 0.0, p * (g - mean), 0.0)
    return tl.where(p != 0.0, p * square, 0.0), u * logs, u * square


@triton.jit
def alpha_gradient(squares, firsts, seconds, entropy, weight, excess):
    """Each row's gradient of alpha: from the sums of :func:`alpha_terms`, entropy and slopes."""
    moved = squares * firsts + entropy * seconds
    return (-seconds - excess * moved) / tl.where(weight == 0.0, 1.0, weight)
