"""The threshold of entmax inside a Triton program: shares of the classes, and the next guess.

``KIND`` says which member of the family: k is alpha = 1 + 1/k, where a probability is the k-th
power of a margin, so that 1 is sparsemax and 2 is entmax at 1.5; 0 is any alpha. ``at`` is the
unknown of a row: the threshold tau, approached from below; for kind 0 the logarithm of the largest
probability, held between ``low`` and ``high``.
A tile is one row (``AXIS`` 0), several (``AXIS`` 1: an unknown for each), or one row in blocks
(``AXIS`` BOTH).

Kernels that use this are launched with ``enable_fp_fusion=False``. Loops here end when sums say
so, and every thread must see the same sums: if the compiler fused the products of one thread into
the exchange of partial sums, two threads would round differently, disagree and wait forever.
"""

import triton
import triton.language as tl

from lastlayer.kernels._triton import chosen_columns, expm1, next_power_of_2

# A sum of float32 probabilities cannot be told from 1 more closely than this. Up to alpha 1.5
# probabilities bend so little that a last step on themselves mends more than that.
SUM_TOLERANCE, EARLY_TOLERANCE = tl.constexpr(2.5e-7), tl.constexpr(1e-4)
# The bracket of kind 0 closes long before; a bound on a loop that a wild row could enter.
MAX_TRIPS = tl.constexpr(120)
BOTH = tl.constexpr(2)
# Beyond, a product of so many margins takes as long as a power.
HIGHEST_KIND = 8
# Up to here one program finds the peaks of a row and finishes it.
WIDEST_IN_ONE_PROGRAM = 16384
# Kinds of entropies, as entropy_and_slope takes them.
ENTROPIES = {2.0: 1, 1.5: 2, 1.0: 3}


def kind_of(alpha: float) -> int:
    """The kind of a fixed alpha."""
    power = 1.0 / (alpha - 1.0) if alpha > 1.0 else 0.0
    kind = round(power)
    return kind if kind <= HIGHEST_KIND and abs(power - kind) < 1e-9 else 0


def group_and_warps(n: int, width: int) -> dict[str, int]:
    """How many chosen blocks of a row a program looks at together, and its warps."""
    scores, warps = (256, 1) if n <= 2048 else (512, 2) if n <= 8192 else (1024, 4)
    return dict(GROUP=max(1, scores // width), num_warps=warps)


@triton.jit
def shares(distance, at, excess, KIND: tl.constexpr):
    """Probabilities at the guess ``at``, and their slopes up to a factor that the row shares."""
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
        # Without the bound 0 * inf would drop the maximum itself when alpha is very large.
        ratio = distance * (excess * tl.exp(tl.minimum(-excess * at, 80.0)))
        inside = ratio > -1.0
        ratio = tl.where(inside, ratio, 0.0)
        grown = 1.0 + ratio
        inverse = 1.0 / grown
        # log(1 + r), right to the last bits for small r: with what the sum 1 + r lost.
        log1p = tl.log(grown) + (ratio - (grown - 1.0)) * inverse
        nearly_softmax = excess < 1e-7
        power = log1p * (1.0 / tl.where(nearly_softmax, 1.0, excess))
        power = tl.where(nearly_softmax, distance, power)
        probs = tl.where(inside, tl.exp(at + power), 0.0)
        slope = probs * inverse
    return probs, slope


@triton.jit
def unsolved_row(peak, KIND: tl.constexpr):
    """``at`` before anything is known of a row: the bound that its maximum alone gives."""
    if KIND == 0:
        return peak * 0.0
    else:
        return peak * 0.0 - 1.0


@triton.jit
def _norm_and_fall(total, weight, KIND: tl.constexpr):
    """The KIND-norm of the margins, and how fast it falls as the threshold rises."""
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
    """A first step for kinds above 0 that lands near the root, on either side of it.

    The norm of the margins falls about as an exponential does where scores thin out upwards, so
    this is Newton's method on its logarithm. It saves a pass over the row.
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
    """The next guess from the sums of :func:`shares` at ``at``, and whether it is another one."""
    if KIND > 0:
        # Newton's method on the KIND-norm of the margins, which is convex and falls with the
        # threshold: it climbs to the root and never passes it.
        norm, fall = _norm_and_fall(total, weight, KIND)
        following = at + (norm - 1.0) / fall
        # A leap may have gone too far. From there the first step leads back below the root.
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
        # A closed bracket ends at its upper end, where the whole support is present.
        following = tl.where(closed, high, following)
        go = unsolved & (following != at) & (total > 0.0) & (excess >= 0.0)
    return tl.where(go, following, at), low, high, go


@triton.jit
def per_class(row_values, AXIS: tl.constexpr):
    """What is known of each row, to be combined with its classes."""
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
    """The unknown of each row of a tile held on chip, with its sums, from a bound ``at``."""
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
    """Rows whose result is NaN: a score is NaN or +inf, or alpha is below 1 or NaN."""
    broken = peak == float("inf")
    if KIND == 0:
        broken = broken | (excess < 0.0) | (excess != excess)
    return broken


@triton.jit
def solved_tile(distance, at, broken, log_n, excess, KIND: tl.constexpr, AXIS: tl.constexpr):
    """The probabilities of a tile held on chip, from a bound ``at``; NaN in broken rows."""
    at, total, weight = solve_tile(distance, at, log_n, excess, KIND, AXIS)
    probs, slope = shares(distance, per_class(at, AXIS), per_class(excess, AXIS), KIND)
    missing = correction(total, weight, broken)
    probs = polished(probs, slope, per_class(missing, AXIS))
    if KIND == 0:
        # Where alpha > 2 slopes are steep at the edge of the support, and a step overshoots.
        reached = row_sum(probs, AXIS)
        reached = tl.where((excess > 1.0) & (reached != 0.0), reached, 1.0)
        probs = probs / per_class(reached, AXIS)
    return probs


@triton.jit
def bound_from_part(distance, peak, log_n, excess, KIND: tl.constexpr):
    """A bound on the unknown of a row from a part of it that has its maximum.

    With fewer classes the same threshold leaves a smaller sum, so the threshold of a part lies
    below that of the whole. The slack covers the rounding of both, and how far a sum may be from
    1: it grows at least as fast as the logarithm of the largest probability.
    """
    at, _, _ = solve_tile(distance, unsolved_row(peak, KIND), log_n, excess, KIND, 0)
    if KIND == 0:
        return tl.minimum(at + (1e-6 + 1.01 * _tolerance(excess)), 0.0)
    else:
        return tl.maximum(at - 1e-6, -1.0)


@triton.jit
def correction(total, weight, broken):
    """What :func:`polished` adds per slope: NaN where a row has no result, 0 where it is empty."""
    missing = tl.where(weight > 0.0, (1.0 - total) / weight, 0.0)
    return tl.where(broken, float("nan"), missing)


@triton.jit
def polished(probs, slope, per_slope):
    """The last Newton step, taken on the probabilities: rounding of the threshold is undone."""
    return tl.maximum(tl.fma(slope, per_slope, probs), 0.0, propagate_nan=tl.PropagateNan.ALL)


def register_tile(n: int) -> tuple[int, int, int]:
    """Width and rows of a tile that one program holds, and its warps."""
    width = max(16, next_power_of_2(n))
    return width, max(1, 512 // width), max(1, min(8, width // 1024))


@triton.jit
def tile(n_rows, n, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows (a scalar where there is one) and columns of this program, and which entries exist."""
    column = tl.arange(0, WIDTH)
    if ROWS == 1:
        row = tl.program_id(0).to(tl.int64)
        return row, column, column < n
    else:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        return row, column[None, :], (row < n_rows)[:, None] & (column[None, :] < n)


@triton.jit
def below(values, origin, SHRINK: tl.constexpr):
    """How far scores lie from the maximum, at most 0."""
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
    # Several loads are then in flight together. Short rows would lose more by the registers, and
    # powers take too long to compile that often.
    UNROLL: tl.constexpr = 4 if KIND > 0 and GROUP * WIDTH > 256 and not LONG else 1
    for first in tl.range(0, count, GROUP, loop_unroll_factor=UNROLL):
        column, live = chosen_columns(chosen, first, count, n, GROUP, WIDTH)
        values = tl.load(scores + column, mask=live, other=-float("inf")).to(tl.float32)
        probs, slope = shares(below(values, origin, SHRINK), at, excess, KIND)
        if LONG:
            # Equal scores round the same way at each addition: a thousand of them would be
            # noticed, so what an addition loses is kept for the next (Kahan's sum).
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
    """As solve_tile, for a row with more candidates than the chip holds: they are read again."""
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
    """The entropy of each class, and its derivative by the probability."""
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
    """``(exp(x) - 1 - x) / x**2``: a series near 0, where that would cancel."""
    near = tl.abs(x) < 0.3
    safe = tl.where(near, 1.0, x)
    series = 1.0 / 362880.0 + x * (1.0 / 3628800.0 + x * (1.0 / 39916800.0))
    series = 1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0 + x * series))
    series = 0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0 + x * series)))
    return tl.where(near, series, (tl.exp(x) - 1.0 - x) / (safe * safe))


@triton.jit
def alpha_terms(p, g, mean, excess):
    """Of each class, what is summed up for the gradient of alpha; README.md has the formula."""
    logs = tl.log(tl.where(p != 0.0, p, 1.0))
    square = logs * logs * exp_remainder(-excess * logs)
    # The derivatives of a row sum to 0: measured from the mean nothing cancels.
    u = tl.where(p != 0.0, p * (g - mean), 0.0)
    return tl.where(p != 0.0, p * square, 0.0), u * logs, u * square


@triton.jit
def alpha_gradient(squares, firsts, seconds, entropy, weight, excess):
    """Of each row, from the sums of :func:`alpha_terms`, the entropy and the sum of slopes."""
    moved = squares * firsts + entropy * seconds
    return (-seconds - excess * moved) / tl.where(weight == 0.0, 1.0, weight)
