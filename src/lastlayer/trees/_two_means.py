"""Two clusters in each of many groups at once: where every vector lies between the two.

A group is centred first. Let r be how much of each vector the second cluster has, W₀ and W₁ the
weights of the two, and S = Σ w r x. As all of the group sums to zero, the means are −S / W₀ and
S / W₁: the single vector S holds both, and x leans to the second cluster by

    s = x·S (1/W₀ + 1/W₁) − |S|² (1/W₁² − 1/W₀²) / 2

which is half the difference of its squared distances. With a common variance σ², found from
the same sums as Σ w |x|² − |S|² (1/W₀ + 1/W₁) over all weights and dimensions, the log-odds are
s / σ² + log W₁ / W₀. So a step of 2-means or of EM is one pass over the group.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lastlayer.trees._arrays import Integers, Offsets, Reals

# Passes to find about the direction of the largest variance, and of 2-means and then EM at most.
_POWER, _PASSES = 3, 12
# A group of which less than this share changes sides has settled.
_SETTLED = 1e-3
# Below this share of the mean square, differences are what rounding leaves.
_NOTHING = 1e-12
# A variance of zero would make sure of everything; this is small beside any other.
_LEAST_VARIANCE = 1e-9
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def _dot(x: NDArray[np.float32], direction: NDArray[np.float32]) -> np.float32:
    total = np.float32(0.0)
    for i in range(len(x)):
        total += x[i] * direction[i]
    return total


def _add_scaled(total: Reals, factor: float, x: NDArray[np.float32]) -> None:
    for i in range(len(x)):
        total[i] += factor * x[i]


def _centre(x: NDArray[np.float32], weight: Reals) -> tuple[float, float]:
    """Takes the mean away; the weighted squares that are left, and those that there were."""
    mean = np.zeros(x.shape[1])
    total = 0.0
    before = 0.0
    for row in range(len(x)):
        _add(mean, weight[row], x[row])
        before += weight[row] * _product(x[row], x[row])
        total += weight[row]
    middle = (mean / total).astype(np.float32)
    after = 0.0
    for row in range(len(x)):
        for i in range(x.shape[1]):
            x[row, i] -= middle[i]
        after += weight[row] * _product(x[row], x[row])
    return after, before


def _main_direction(x: NDArray[np.float32], weight: Reals, chance: int) -> NDArray[np.float32]:
    """About the direction of the largest variance, from random signs."""
    direction = np.empty(x.shape[1], np.float32)
    bits = np.uint64(chance)
    for i in range(len(direction)):
        # Steps of splitmix64.
        bits += np.uint64(0x9E3779B97F4A7C15)
        mixed = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        direction[i] = np.float32(1.0) if (mixed >> np.uint64(63)) else np.float32(-1.0)
    for _ in range(_POWER):
        total = np.zeros(x.shape[1])
        for row in range(len(x)):
            _add(total, weight[row] * _product(x[row], direction), x[row])
        largest = np.abs(total).max()
        if largest == 0.0:
            break
        direction = (total / largest).astype(np.float32)
    return direction


def _log_odds(
    x: NDArray[np.float32], weight: Reals, squares: float, chance: int, odds: Reals
) -> bool:
    """The log-odds of the second cluster for each row; False where there are no two clusters."""
    n, d = x.shape
    every = weight.sum()
    direction = _direction_of(x, weight, chance)
    # scale · x·direction − offset are the log-odds; until 2-means settles their sign alone counts.
    scale, offset, soft = 1.0, 0.0, False
    share = np.full(n, -1.0)
    for _ in range(_PASSES):
        total = np.zeros(d)
        second = 0.0
        moved = 0.0
        for row in range(n):
            odds[row] = scale * _product(x[row], direction) - offset
            if soft:
                responsible = 1.0 / (1.0 + math.exp(-odds[row]))
            else:
                responsible = 1.0 if odds[row] > 0.0 else 0.0
            moved += weight[row] * abs(responsible - share[row])
            share[row] = responsible
            if responsible > 0.0:
                _add(total, weight[row] * responsible, x[row])
                second += weight[row] * responsible
        first = every - second
        largest = np.abs(total).max()
        if not (first > _NOTHING * every and second > _NOTHING * every and largest > 0.0):
            return False
        if moved <= _SETTLED * every:
            if soft:
                break
            soft = True
        length = (total * total).sum()
        between = 1.0 / first + 1.0 / second
        variance = max(squares - length * between, _LEAST_VARIANCE * squares) / (d * every)
        direction = (total / largest).astype(np.float32)
        scale = between * largest / variance
        offset = 0.5 * length * (1.0 / second**2 - 1.0 / first**2) / variance
        if soft:
            offset -= math.log(second / first)
    return True


def _cut_in_half(weight: Reals) -> int:
    """Where the weights on both sides are most alike; of equal places the nearest the middle."""
    n = len(weight)
    half = 0.5 * weight.sum()
    best, cut, so_far = np.inf, 1, 0.0
    for place in range(1, n):
        so_far += weight[place - 1]
        apart = abs(so_far - half)
        nearer = abs(2 * place - n) < abs(2 * cut - n) or (n % 2 == 1 and 2 * place == n + 1)
        if apart < best or (apart == best and nearer):
            best, cut = apart, place
    return cut


def _split_groups(
    start: int,
    stop: int,
    x: NDArray[np.float32],
    weight: Reals,
    group_start: Offsets,
    chance: int,
    by_odds: bool,
    levels_left: int,
    unsure: float,
    order: Integers,
    odds: Reals,
    cuts: Integers,
) -> None:
    """Sorts the rows of each group by their log-odds, and cuts it.

    Takes the groups that start in a range of rows: large ones have many, so rows are shared out.

    Args:
        start: of the range.
        stop: of the range.
        x: all rows, which are centred in their groups.
        weight: of each row.
        group_start: the first row of each group.
        chance: where random numbers start.
        by_odds: cut where the log-odds change their sign, rather than in half.
        levels_left: below the two sides; where a side could need more, the cut is in half.
        unsure: rows with log-odds closer to 0 are wanted on both sides.
        order: the rows as sorted, to be written.
        odds: their log-odds, to be written.
        cuts: ``(groups, 3)``: where the second side starts, the cut, and where the first side
            ends; to be written.
    """
    group = np.searchsorted(group_start, start)
    while group < len(group_start) - 1 and group_start[group] < stop:
        first, end = group_start[group], group_start[group + 1]
        n = end - first
        weights = weight[first:end].copy()
        if weights.sum() == 0.0:
            weights[:] = 1.0
        order[first:end] = np.arange(first, end)
        odds[first:end] = 0.0
        apart = False
        if n > 2:
            rows = x[first:end]
            after, before = _centred(rows, weights)
            if after > _NOTHING * before:
                apart = _odds_of(rows, weights, after, chance + group, odds[first:end])
        if apart:
            ranks = np.argsort(odds[first:end], kind="mergesort")
            order[first:end] += ranks - np.arange(n)
            odds[first:end] = odds[first:end][ranks]
            weights = weights[ranks]
        cut = _half(weights)
        low = high = cut
        deep = n > 2 and (n - 2) >> min(levels_left, 62) > 0
        if deep:
            low = cut = high = (n + 1) // 2
        elif by_odds and apart:
            place = np.searchsorted(odds[first:end], 0.0, side="right")
            if 0 < place < n:
                cut = place
                low = max(1, np.searchsorted(odds[first:end], -unsure, side="right"))
                high = min(n - 1, np.searchsorted(odds[first:end], unsure, side="left"))
                low, high = min(low, cut), max(high, cut)
        cuts[group, 0] = first + low
        cuts[group, 1] = first + cut
        cuts[group, 2] = first + high
        group += 1


_product = njit(nogil=True, cache=True, fastmath=_FAST)(_dot)
_add = njit(nogil=True, cache=True, fastmath=_FAST)(_add_scaled)
_centred = njit(nogil=True, cache=True)(_centre)
_direction_of = njit(nogil=True, cache=True)(_main_direction)
_odds_of = njit(nogil=True, cache=True, error_model="numpy")(_log_odds)
_half = njit(nogil=True, cache=True)(_cut_in_half)
split_groups = njit(nogil=True, cache=True)(_split_groups)
