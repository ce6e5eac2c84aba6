"""A proposal of n-grams on the CPU: a row at a time, whose list is read where it lies.

Loops that can be vectorised, those of random words and of logarithms, stand apart from those that
look things up.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype, in_dtype
from lastlayer.kernels._cpu import as_rows, by_rows, empty
from lastlayer.kernels._cpu_math import BLOCK, dot, exp, largest, log, philox
from lastlayer.kernels.context_lists import (
    GOLDEN,
    LEAST_PART,
    NO_KEY,
    PARTS,
    SHARES,
    UNUSED,
    WAYS,
)
from lastlayer.kernels.rng import FORKS

# What a draw costs in entries of a plain loop, for the choice of threads; and what one learns from.
_ENTRIES_A_DRAW, _ENTRIES_A_SCORE = 32, 32
_FORKS = np.int64(FORKS)
_LOG_2, _TINY = math.log(2.0), np.finfo(np.float64).tiny


def draw(
    context: Tensor, counter: Tensor, proposal: Sequence[Tensor], n: int
) -> tuple[Tensor, Tensor]:
    rows = context.shape[0]
    ids = torch.empty(rows, n, dtype=torch.int64)
    log_prob = torch.empty(rows, n, dtype=torch.float32)
    if ids.numel():
        _draw_rows(
            rows, _ENTRIES_A_DRAW * n, _array(context), counter.numpy(), *_arrays(proposal),
            ids.numpy(), log_prob.numpy(),
        )  # fmt: skip
    return ids, log_prob


def log_prob(context: Tensor, ids: Tensor, proposal: Sequence[Tensor]) -> Tensor:
    made = torch.empty(ids.shape, dtype=torch.float64)
    if ids.numel():
        _log_prob_rows(
            ids.shape[0], _ENTRIES_A_DRAW * ids.shape[1], _array(context), _array(ids),
            *_arrays(proposal), made.numpy(),
        )  # fmt: skip
    return made


def draw_until_(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, context: Tensor, counter: Tensor,
    proposal: Sequence[Tensor], used: Tensor, ess: Tensor, sums: Tensor, first: int, blocks: int,
    n: int, enough: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = accumulation_dtype(hidden.dtype)
    shape = hidden.shape[0], blocks * n
    ids, log_q, scores = (empty(shape, kind) for kind in (torch.int64, dtype, dtype))
    biases = torch.empty(0, dtype=dtype) if bias is None else in_dtype(bias.detach(), dtype)
    if ids.numel():
        entries = (_ENTRIES_A_DRAW + hidden.shape[1] // 8) * n
        _until_rows(
            shape[0], entries, as_rows(hidden), as_rows(weight.detach().to(dtype)), _array(biases),
            _array(context), counter.numpy(), *_arrays(proposal), used.numpy(), ess.numpy(),
            sums.numpy(), first, blocks, n, float(enough), ids.numpy(), log_q.numpy(),
            scores.numpy(),
        )  # fmt: skip
    return ids, log_q, scores


def learn_(
    context: Tensor, ids: Tensor, scores: Tensor, proposal: Sequence[Tensor], rate: float,
    mixture_rate: float,
) -> None:  # fmt: skip
    if not ids.numel():
        return
    words, wide = _array(context), scores.detach()
    wide = wide if wide.dtype in (torch.float32, torch.float64) else wide.float()
    given = _array(ids), _array(wide)
    mixture, _, unigram, *lists = arrays = _arrays(proposal)
    (rows, m), width = ids.shape, lists[0][1].shape[1]
    known, slopes = np.empty(rows, np.bool_), np.empty((rows, len(mixture)))
    _slope_rows(rows, _ENTRIES_A_SCORE * m, words, *given, *arrays, known, slopes)
    for k in range(words.shape[1]):
        # One list is one row's: rows can be shared out to threads.
        teachers, place = _teachers_(k, words, known, len(unigram), lists[k][0])
        entries = _ENTRIES_A_SCORE * (m + width)
        if len(teachers):
            _merge_rows(
                len(teachers), entries, teachers, place, *given, unigram, lists[k], float(rate)
            )
    taught = known & (words[:, -1] >= 0)
    if taught.any():
        slope = slopes[taught].sum(0)
        moves = mixture_rate * slope / taught.sum()
        shares = mixture * np.exp(moves - moves.max())
        shares = np.maximum(shares / shares.sum(), LEAST_PART)
        mixture[:] = shares / shares.sum() * PARTS
        mixture[0] += PARTS - mixture.sum()


def _array(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy()


def _arrays(proposal: Sequence[Tensor]) -> list[Any]:
    """Mixture, table, weight, and two tuples of lists; the second is not used where there is one."""
    made = [each.numpy() for each in proposal]
    return [*made[:3], tuple(made[3:7]), tuple(made[-4:])]


@njit(nogil=True)
def _fork(seed, number):
    """The seed of a fork, as :func:`rng.fork` makes it."""
    a, b, _, _ = philox(np.uint64(0), np.uint64(seed), np.uint64(_FORKS + number))
    return np.int64(a << np.uint64(32) | b)


@njit(nogil=True)
def _log2(size):
    bits = 0
    while 1 << bits < size:
        bits += 1
    return bits


@njit(nogil=True)
def _key(context, k, n_classes):
    """A number for the last ``k + 1`` words, -1 where one of them is none."""
    last = context[len(context) - 1]
    if k == 0 or last < 0:
        return last
    other = context[len(context) - 2]
    return last * n_classes + other if other >= 0 else np.int64(-1)


@njit(nogil=True)
def _bucket(keys, key):
    return (((key * GOLDEN) >> 33) & ((len(keys) - 1) // WAYS - 1)) * WAYS


@njit(nogil=True)
def _find(keys, key):
    """The place of a key, -1 where it has none."""
    if key >= 0:
        first = _bucket(keys, key)
        for place in range(first, first + WAYS):
            if keys[place] == key:
                return place
    return -1


@njit(nogil=True)
def _places(context, n_classes, lists, lists_2):
    place = _find(lists[0], _key(context, 0, n_classes))
    if len(context) == 1:
        return place, -1
    return place, _find(lists_2[0], _key(context, 1, n_classes))


@njit(nogil=True)
def _at(classes, wanted):
    """Where a class is on a list, or any other place."""
    low, size = 0, len(classes)
    while size > 1:
        half = size >> 1
        low = low + half if classes[low + half - 1] < wanted else low
        size -= half
    return low


@njit(nogil=True)
def _drawn_again(lists, place, one, chance):
    """A draw from the list where the class is on it, else the class."""
    classes, end = lists[1][place], lists[2][place]
    if classes[_at(classes, one)] != one:
        return one
    low, size = 0, len(end)
    while size > 1:
        half = size >> 1
        low = low + half if end[low + half - 1] <= chance else low
        size -= half
    return np.int64(classes[low])


@njit(nogil=True)
def _part(lists, place, one, own):
    """The probability of a class in units of the unigram's weights, of which it has ``own``."""
    if place < 0:
        return own
    classes, end = lists[1][place], lists[2][place]
    at = _at(classes, one)
    if classes[at] != one:
        return own
    before = end[at - 1] if at else np.int64(0)
    return np.float64(lists[3][place]) * (np.float64(end[at] - before) / SHARES)


@njit(nogil=True)
def _shares_of(mixture):
    third = np.float64(mixture[2]) / PARTS if len(mixture) > 2 else 0.0
    return np.float64(mixture[0]) / PARTS, np.float64(mixture[1]) / PARTS, third


@njit(nogil=True)
def _mixed(one, unigram, shares, lists, place, lists_2, place_2):
    own = np.float64(unigram[one])
    total = shares[0] * own + shares[1] * _part(lists, place, one, own)
    return total + shares[2] * _part(lists_2, place_2, one, own)


@njit(nogil=True)
def _draw_row(
    row, seed, step, places, mixture, table, unigram, lists, lists_2, words, ids, log_prob
):  # fmt: skip
    """All draws of a row; ``words`` is room to work in, 2 × (draws + 2)."""
    (place, place_2), n, bits = places, len(ids), _log2(len(table))
    begin, at = row * n, np.uint64(step)
    # A block of random words serves two draws.
    seed_0, seed_1 = np.uint64(_fork(seed, 0)), np.uint64(_fork(seed, 1))
    for i in range((begin + n - 1) // 2 - begin // 2 + 1):
        a, b, c, d = philox(np.uint64(begin // 2 + i), seed_0, at)
        words[0, 2 * i], words[1, 2 * i] = np.int64(a), np.int64(b)
        words[0, 2 * i + 1], words[1, 2 * i + 1] = np.int64(c), np.int64(d)
    odd = begin % 2
    for j in range(n):
        column = words[0, odd + j] >> (32 - bits)
        entry = table[column]
        ids[j] = column if words[1, odd + j] < (entry & 0xFFFFFFFF) else entry >> 32
    if place >= 0 or place_2 >= 0:
        for j in range(n):
            a, b, c, _ = philox(np.uint64(begin + j), seed_1, at)
            words[0, j] = np.int64(a)
            words[1, j] = np.int64(b << np.uint64(8) | c >> np.uint64(24))
        bound, bound_2 = mixture[0], mixture[0] + mixture[1]
        for j in range(n):
            if words[0, j] >= bound_2:
                if place_2 >= 0:
                    ids[j] = _drawn_again(lists_2, place_2, ids[j], words[1, j])
            elif words[0, j] >= bound and place >= 0:
                ids[j] = _drawn_again(lists, place, ids[j], words[1, j])
    shares, log_total, units = _shares_of(mixture), (bits + 32) * _LOG_2, words[0].view(np.float64)
    for j in range(n):
        units[j] = _mixed(ids[j], unigram, shares, lists, place, lists_2, place_2)
    for j in range(n):
        log_prob[j] = log(units[j]) - log_total


@by_rows
@njit(nogil=True, cache=True)
def _draw_rows(
    start, stop, context, counter, mixture, table, unigram, lists, lists_2, ids, log_prob
):  # fmt: skip
    words = np.empty((2, ids.shape[1] + 2), np.int64)
    for row in range(start, stop):
        places = _places(context[row], len(unigram), lists, lists_2)
        _draw_row(
            row, counter[0], counter[1], places, mixture, table, unigram, lists, lists_2, words,
            ids[row], log_prob[row],
        )  # fmt: skip


@by_rows
@njit(nogil=True, cache=True)
def _log_prob_rows(start, stop, context, ids, mixture, table, unigram, lists, lists_2, made):
    shares, log_total = _shares_of(mixture), (_log2(len(table)) + 32) * _LOG_2
    for row in range(start, stop):
        place, place_2 = _places(context[row], len(unigram), lists, lists_2)
        for j in range(ids.shape[1]):
            one = ids[row, j]
            made[row, j] = _mixed(one, unigram, shares, lists, place, lists_2, place_2)
        for j in range(ids.shape[1]):
            made[row, j] = log(made[row, j]) - log_total


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _until_rows(
    start, stop, hidden, weight, bias, context, counter, mixture, table, unigram, lists, lists_2,
    used, ess, sums, first, blocks, n, enough, ids, log_q, scores,
):  # fmt: skip
    real = hidden.dtype.type
    words, lanes, log_r = np.empty((2, n + 2), np.int64), np.empty(BLOCK), np.empty(n)
    for row in range(start, stop):
        done, last = 0, first + blocks
        if used[row] == first and ess[row] < enough:
            places = _places(context[row], len(unigram), lists, lists_2)
            peak, total, squares = np.float64(sums[row, 0]), sums[row, 1], sums[row, 2]
            while done < blocks and (done == 0 or ess[row] < enough):
                there = slice(done * n, (done + 1) * n)
                drawn, probs, found = ids[row, there], log_q[row, there], scores[row, there]
                _draw_row(
                    row, _fork(counter[0], first + done), counter[1], places, mixture, table,
                    unigram, lists, lists_2, words, drawn, probs,
                )  # fmt: skip
                for j in range(n):
                    found[j] = dot(hidden[row], weight[drawn[j]])
                if len(bias):
                    for j in range(n):
                        found[j] += bias[drawn[j]]
                for j in range(n):
                    log_r[j] = np.float64(found[j]) - np.float64(probs[j])
                new_peak = largest(log_r, lanes, peak)
                if new_peak > -np.inf or peak > -np.inf or np.isnan(log_r).any():
                    shrunk = exp(peak - new_peak)
                    total, squares = total * shrunk, squares * shrunk * shrunk
                    peak = new_peak
                    for j in range(n):
                        log_r[j] = exp(log_r[j] - peak)
                    for j in range(n):
                        total += log_r[j]
                        squares += log_r[j] * log_r[j]
                done += 1
                ess[row] = real(total * total / squares) if total != 0.0 else real(0.0)
            used[row] = first + done
            sums[row, 0], sums[row, 1], sums[row, 2] = peak, total, squares
        ids[row, done * n :] = -1
        log_q[row, done * n :] = np.inf
        scores[row, done * n :] = 0.0


@njit(nogil=True)
def _distinct(ids, scores, table, classes, values):
    """Each class of a row once, with its first score; how many there are."""
    table[:] = -1
    count, mask = 0, len(table) - 1
    for j in range(len(ids)):
        one = ids[j]
        if one >= 0:
            slot = (one * GOLDEN >> 40) & mask
            while table[slot] >= 0 and classes[table[slot]] != one:
                slot = (slot + 1) & mask
            if table[slot] < 0:
                table[slot], classes[count], values[count] = count, one, scores[j]
                count += 1
    return count


@njit(nogil=True)
def _softmax(values):
    """In place; whether there are probabilities."""
    peak, fine = -np.inf, True
    for value in values:
        peak = max(peak, value)
        fine &= not math.isnan(value)
    if not fine or not math.isfinite(peak):
        return False
    total = 0.0
    for j in range(len(values)):
        values[j] = exp(values[j] - peak)
    for j in range(len(values)):
        total += values[j]
    for j in range(len(values)):
        values[j] /= total
    return True


@njit(nogil=True)
def _room(m):
    """To find the distinct classes of a row in, for them, and for their scores."""
    return np.empty(2 << _log2(m), np.int32), np.empty(m, np.int64), np.empty(m)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _slope_rows(
    start, stop, context, ids, scores, mixture, table, unigram, lists, lists_2, known, slopes
):  # fmt: skip
    slots, classes, target = _room(ids.shape[1])
    shares = _shares_of(mixture)
    for row in range(start, stop):
        slopes[row] = 0.0
        count = _distinct(ids[row], scores[row], slots, classes, target)
        known[row] = _softmax(target[:count])
        if not known[row] or context[row, -1] < 0:
            continue
        place, place_2 = _places(context[row], len(unigram), lists, lists_2)
        own = first = second = pull_own = pull_first = pull_second = 0.0
        for j in range(count):
            a = np.float64(unigram[classes[j]])
            b = _part(lists, place, classes[j], a)
            c = _part(lists_2, place_2, classes[j], a)
            pull = target[j] / (shares[0] * a + shares[1] * b + shares[2] * c)
            own, first, second = own + a, first + b, second + c
            pull_own, pull_first = pull_own + pull * a, pull_first + pull * b
            pull_second += pull * c
        within = 1.0 / (shares[0] * own + shares[1] * first + shares[2] * second)
        slopes[row, 0] = pull_own - within * own
        slopes[row, 1] = pull_first - within * first
        if len(mixture) > 2:
            slopes[row, 2] = pull_second - within * second


@njit(nogil=True, cache=True)
def _teachers_(k, context, known, n_classes, keys):
    """The rows that teach a list, the last ones of each context, and its place; makes places."""
    rows = len(context)
    slots, mask = np.full(2 << _log2(rows), -1), (2 << _log2(rows)) - 1
    teachers, place, count = np.empty(rows, np.int64), np.empty(rows, np.int64), 0
    for row in range(rows - 1, -1, -1):
        key = _key(context[row], k, n_classes) if known[row] else np.int64(-1)
        if key >= 0:
            slot = (key * GOLDEN >> 33) & mask
            while slots[slot] >= 0 and slots[slot] != key:
                slot = (slot + 1) & mask
            if slots[slot] < 0:
                slots[slot] = key
                teachers[count] = row
                count += 1
    teachers, found = teachers[:count][::-1].copy(), 0
    for row in teachers:
        key = _key(context[row], k, n_classes)
        at, first = _find(keys, key), _bucket(keys, key)
        for way in range(first, first + WAYS):
            if at < 0 and keys[way] == NO_KEY:
                keys[way] = key
                at = way
        if at >= 0:
            teachers[found], place[found] = row, at
            found += 1
    return teachers[:found], place[:found]


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _merge_rows(start, stop, teachers, place, ids, scores, unigram, lists, rate):
    m, width = ids.shape[1], lists[1].shape[1]
    slots, found, target = _room(m)
    ranked = np.empty(m, np.int64)
    merged, weight, is_new = np.empty(m + width, np.int64), np.empty(m + width), np.empty(m + width)
    value, matters, ranks = np.empty(m + width), np.empty(m + width), np.empty(m + width)
    for i in range(start, stop):
        row, at = teachers[i], place[i]
        count = _distinct(ids[row], scores[row], slots, found, target)
        _softmax(target[:count])
        for j in range(count):
            ranked[j] = found[j] << 32 | j
        ranked[:count].sort()
        total = 0.0
        for j in range(count):
            total += _part(lists, at, found[j], np.float64(unigram[found[j]]))
        classes, end, mass = lists[1][at], lists[2][at], np.float64(lists[3][at])
        # Two ascending lists become one; a class that is on both has its new probability.
        size, old, before = 0, 0, np.int64(0)
        for j in range(count + 1):
            one = ranked[j] >> 32 if j < count else np.int64(UNUSED)
            own, part = 0.0, 0.0
            if j < count:
                own = part = np.float64(unigram[one])
            while old < width and classes[old] <= one and classes[old] != UNUSED:
                share = mass * (np.float64(end[old] - before) / SHARES)
                if classes[old] == one:
                    part = share
                else:
                    merged[size], value[size], is_new[size] = classes[old], share, 0.0
                    weight[size] = np.float64(unigram[classes[old]])
                    size += 1
                before = end[old]
                old += 1
            if j < count:
                moved = part + rate * (total * target[ranked[j] & 0xFFFFFFFF] - part)
                merged[size], value[size], is_new[size] = one, moved, 1.0
                weight[size] = own
                size += 1
        if size > width:
            for j in range(size):
                matters[j] = ranks[j] = abs(value[j] - weight[j])
            size = _keep(width, ranks[:size], matters, merged, value, weight, is_new)
        _write_list(merged[:size], value[:size], unigram, at, lists)


@njit(nogil=True)
def _keep(width, ranks, matters, merged, value, weight, is_new):
    """The ``width`` entries that matter most, in their order; of equal ones those before new."""
    size = len(ranks)
    least = _nth_largest(ranks, width)
    spare = width
    for j in range(size):
        spare -= matters[j] > least
    kept_old = 0
    for j in range(size):
        kept_old += matters[j] == least and is_new[j] == 0.0
    kept_old = min(kept_old, spare)
    kept_new, kept = spare - kept_old, 0
    for j in range(size):
        take = matters[j] > least
        if matters[j] == least and is_new[j] == 0.0 and kept_old > 0:
            take, kept_old = True, kept_old - 1
        elif matters[j] == least and is_new[j] != 0.0 and kept_new > 0:
            take, kept_new = True, kept_new - 1
        if take:
            merged[kept], value[kept] = merged[j], value[j]
            kept += 1
    return kept


@njit(nogil=True)
def _nth_largest(values, n):
    """The n-th largest number; values are put into another order."""
    low, high = 0, len(values) - 1
    while low < high:
        pivot, i, j = values[(low + high) >> 1], low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i, j = i + 1, j - 1
        if n - 1 <= j:
            high = j
        elif n - 1 >= i:
            low = i
        else:
            break
    return values[n - 1]


@njit(nogil=True, error_model="numpy")
def _write_list(merged, value, unigram, at, lists):
    """Shares are integers of at least 1; what rounding leaves goes to the largest."""
    classes, end = lists[1][at], lists[2][at]
    size, total, mass, left, best = len(merged), 0.0, np.int64(0), np.int64(SHARES), 0
    for j in range(size):
        total += value[j]
    for j in range(size):
        share = max(np.int64(value[j] / max(total, _TINY) * SHARES), 1)
        classes[j], end[j] = merged[j], share
        mass, left = mass + unigram[merged[j]], left - share
        best = j if share > end[best] else best
    end[best] += left
    for j in range(1, size):
        end[j] += end[j - 1]
    classes[size:], end[size:] = UNUSED, SHARES
    lists[3][at] = mass
