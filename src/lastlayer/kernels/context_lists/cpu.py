"""The adaptive n-gram proposal on the CPU, row by row, without copies of the lists.

Loops that can be vectorised, over random words and logarithms, are separate from lookups.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels._cpu import as_rows, by_rows, empty
from lastlayer.kernels._cpu_math import BLOCK, FAST, exp, largest, log, philox
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

# The cost of a draw, and of a scored class in learn_, in entries of a plain loop: it determines the
# number of threads.
_ENTRIES_A_DRAW, _ENTRIES_A_SCORE = 32, 32
_FORKS = np.int64(FORKS)
# Slots of the hash table by which a class is found on a list, without collisions for most lists.
_SLOTS = 4096
_LOG_2, _TINY = math.log(2.0), np.finfo(np.float64).tiny


def draw(
    context: Tensor, counter: Tensor, proposal: Sequence[Tensor], n: int
) -> tuple[Tensor, Tensor]:
    rows = context.shape[0]
    ids = torch.empty(rows, n, dtype=torch.int64)
    log_prob = torch.empty(rows, n, dtype=torch.float32)
    if ids.numel():
        _draw_rows(
            rows, _ENTRIES_A_DRAW * n, _array(context), as_numpy(counter), *_arrays(proposal),
            as_numpy(ids), as_numpy(log_prob),
        )  # fmt: skip
    return ids, log_prob


def log_prob(context: Tensor, ids: Tensor, proposal: Sequence[Tensor]) -> Tensor:
    made = torch.empty(ids.shape, dtype=torch.float64)
    if ids.numel():
        _log_prob_rows(
            ids.shape[0], _ENTRIES_A_DRAW * ids.shape[1], _array(context), _array(ids),
            *_arrays(proposal), as_numpy(made),
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
            _array(context), as_numpy(counter), *_arrays(proposal), as_numpy(used), as_numpy(ess),
            as_numpy(sums), first, blocks, n, float(enough), as_numpy(ids), as_numpy(log_q),
            as_numpy(scores),
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
        # Each list is updated by one row, so rows can be distributed over threads.
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
    return as_numpy(tensor.contiguous())


def _arrays(proposal: Sequence[Tensor]) -> list[Any]:
    """Mixture, table, weight, and two tuples of lists, equal if there is only one."""
    made = [as_numpy(each) for each in proposal]
    return [*made[:3], tuple(made[3:7]), tuple(made[-4:])]


@njit(nogil=True)
def _fork(seed, number):
    """The seed of a fork, as computed by :func:`rng.fork`."""
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
    """The key of the last ``k + 1`` words; -1 if one of them is missing."""
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
    """The place of a key; the last place for an unknown key."""
    if key >= 0:
        first = _bucket(keys, key)
        for place in range(first, first + WAYS):
            if keys[place] == key:
                return place
    return len(keys) - 1


@njit(nogil=True)
def _open(lists, context, k, n_classes, slots, parts):
    """The place of a row's list; fills ``slots`` with its index, ``parts`` with probabilities.

    Probabilities are in units of the unigram's weights.
    """
    if k >= len(context):
        return np.int64(len(lists[0]) - 1)
    slots[:] = -1
    place = _find(lists[0], _key(context, k, n_classes))
    classes, end, mass = lists[1][place], lists[2][place], np.float64(lists[3][place])
    before = np.int64(0)
    for at in range(len(classes)):
        if classes[at] == UNUSED:
            break
        slots[classes[at] & (_SLOTS - 1)] = at
        parts[at] = mass * (np.float64(end[at] - before) / SHARES)
        before = end[at]
    return np.int64(place)


@njit(nogil=True)
def _find_all(ids, classes, slots, at, missed):
    """The position of classes on a list, -1 if absent; ``missed`` is scratch memory.

    Whether a class is on the list is unpredictable, so this and the following functions do not
    branch on it.
    """
    count = 0
    for j in range(len(ids)):
        found = slots[ids[j] & (_SLOTS - 1)]
        same = classes[max(found, 0)] == ids[j]
        at[j] = found if same else -1
        missed[count] = j
        count += (found >= 0) & (not same)
    # The slot has another class of the list: binary search.
    for i in range(count):
        j, low, size = missed[i], 0, len(classes)
        while size > 1:
            half = size >> 1
            low += half * (classes[low + half - 1] < ids[j])
            size -= half
        at[j] = low if classes[low] == ids[j] else -1


@njit(nogil=True)
def _draw_again(k, mixture, classes, end, slots, room, ids):
    """Redraws from a list the ids for which the mixture selects it and which are on it."""
    word, chance, chosen, at = room[0], room[1], room[2], room[3]
    _find_all(ids, classes, slots, at, chosen)
    low, count = mixture[:k].sum(), 0
    high = low + mixture[k]
    for j in range(len(ids)):
        chosen[count] = j
        count += (at[j] >= 0) & (word[j] >= low) & (word[j] < high)
    for i in range(count):
        j, first, size = chosen[i], 0, len(end)
        while size > 1:
            half = size >> 1
            first += half * (end[first + half - 1] <= chance[j])
            size -= half
        ids[j] = classes[first]


@njit(nogil=True)
def _add_parts(share, ids, unigram, classes, parts, slots, room, units):
    """Adds ``share`` times an n-gram's probabilities, in units of the unigram's weights."""
    at = room[3]
    _find_all(ids, classes, slots, at, room[2])
    for j in range(len(ids)):
        own, listed = np.float64(unigram[ids[j]]), parts[max(at[j], 0)]
        units[j] += share * (listed if at[j] >= 0 else own)


@njit(nogil=True)
def _log_probs(
    ids, mixture, bits, unigram, lists, place, lists_2, place_2, slots, parts, room, made
):
    """Writes the log-probabilities of classes of a row."""
    units = room[4].view(np.float64)
    share = np.float64(mixture[0]) / PARTS
    for j in range(len(ids)):
        units[j] = share * np.float64(unigram[ids[j]])
    share = np.float64(mixture[1]) / PARTS
    _add_parts(share, ids, unigram, lists[1][place], parts[0], slots[0], room, units)
    if len(mixture) > 2:
        share = np.float64(mixture[2]) / PARTS
        _add_parts(share, ids, unigram, lists_2[1][place_2], parts[1], slots[1], room, units)
    log_total = (bits + 32) * _LOG_2
    for j in range(len(ids)):
        made[j] = log(units[j]) - log_total


@njit(nogil=True)
def _draw_unigram(begin, seed, step, bits, table, words, ids):
    # A block of random words serves two draws.
    for i in range((begin + len(ids) - 1) // 2 - begin // 2 + 1):
        a, b, c, d = philox(np.uint64(begin // 2 + i), np.uint64(seed), np.uint64(step))
        words[0, 2 * i], words[1, 2 * i] = np.int64(a), np.int64(b)
        words[0, 2 * i + 1], words[1, 2 * i + 1] = np.int64(c), np.int64(d)
    odd = begin % 2
    for j in range(len(ids)):
        column = words[0, odd + j] >> (32 - bits)
        entry = table[column]
        ids[j] = column if words[1, odd + j] < (entry & 0xFFFFFFFF) else entry >> 32


@njit(nogil=True)
def _draw_row(
    row, seed, step, place, place_2, slots, parts, mixture, table, unigram, lists, lists_2, room,
    ids, log_prob,
):  # fmt: skip
    """Writes all draws of a row and their log-probabilities."""
    begin, bits = row * len(ids), _log2(len(table))
    _draw_unigram(begin, _fork(seed, 0), step, bits, table, room, ids)
    if place < len(lists[0]) - 1 or place_2 < len(lists_2[0]) - 1:
        other = np.uint64(_fork(seed, 1))
        for j in range(len(ids)):
            a, b, c, _ = philox(np.uint64(begin + j), other, np.uint64(step))
            room[0, j] = np.int64(a)
            room[1, j] = np.int64(b << np.uint64(8) | c >> np.uint64(24))
        _draw_again(1, mixture, lists[1][place], lists[2][place], slots[0], room, ids)
        if len(mixture) > 2:
            _draw_again(2, mixture, lists_2[1][place_2], lists_2[2][place_2], slots[1], room, ids)
    _log_probs(
        ids, mixture, bits, unigram, lists, place, lists_2, place_2, slots, parts, room, log_prob
    )


@by_rows
@njit(nogil=True, cache=True)
def _draw_rows(
    start, stop, context, counter, mixture, table, unigram, lists, lists_2, ids, log_prob
):  # fmt: skip
    room = np.empty((5, ids.shape[1] + 2), np.int64)
    slots, parts = np.empty((2, _SLOTS), np.int32), np.empty((2, lists[1].shape[1]))
    for row in range(start, stop):
        place = _open(lists, context[row], 0, len(unigram), slots[0], parts[0])
        place_2 = _open(lists_2, context[row], 1, len(unigram), slots[1], parts[1])
        _draw_row(
            row, counter[0], counter[1], place, place_2, slots, parts, mixture, table, unigram,
            lists, lists_2, room, ids[row], log_prob[row],
        )  # fmt: skip


@by_rows
@njit(nogil=True, cache=True)
def _log_prob_rows(start, stop, context, ids, mixture, table, unigram, lists, lists_2, made):
    room = np.empty((5, ids.shape[1]), np.int64)
    slots, parts = np.empty((2, _SLOTS), np.int32), np.empty((2, lists[1].shape[1]))
    for row in range(start, stop):
        place = _open(lists, context[row], 0, len(unigram), slots[0], parts[0])
        place_2 = _open(lists_2, context[row], 1, len(unigram), slots[1], parts[1])
        _log_probs(
            ids[row], mixture, _log2(len(table)), unigram, lists, place, lists_2, place_2, slots,
            parts, room, made[row],
        )  # fmt: skip


@njit(nogil=True, fastmath=FAST)
def _score(state, weight, bias, ids, scores):
    for j in range(len(ids)):
        one, total = ids[j], state.dtype.type(0.0)
        for i in range(len(state)):
            total += state[i] * weight[one, i]
        scores[j] = total + bias[one] if len(bias) else total


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _until_rows(
    start, stop, hidden, weight, bias, context, counter, mixture, table, unigram, lists, lists_2,
    used, ess, sums, first, blocks, n, enough, ids, log_q, scores,
):  # fmt: skip
    slots, parts = np.empty((2, _SLOTS), np.int32), np.empty((2, lists[1].shape[1]))
    room, lanes, log_r = np.empty((5, n + 2), np.int64), np.empty(BLOCK), np.empty(n)
    for row in range(start, stop):
        done = 0
        if used[row] == first and ess[row] < enough:
            place = _open(lists, context[row], 0, len(unigram), slots[0], parts[0])
            place_2 = _open(lists_2, context[row], 1, len(unigram), slots[1], parts[1])
            peak, total, squares = np.float64(sums[row, 0]), sums[row, 1], sums[row, 2]
            while done < blocks and (done == 0 or ess[row] < enough):
                there = slice(done * n, (done + 1) * n)
                drawn, probs, found = ids[row, there], log_q[row, there], scores[row, there]
                _draw_row(
                    row, _fork(counter[0], first + done), counter[1], place, place_2, slots,
                    parts, mixture, table, unigram, lists, lists_2, room, drawn, probs,
                )  # fmt: skip
                _score(hidden[row], weight, bias, drawn, found)
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
                ess[row] = total * total / squares if total != 0.0 else 0.0
            used[row] = first + done
            sums[row, 0], sums[row, 1], sums[row, 2] = peak, total, squares
        ids[row, done * n :] = -1
        log_q[row, done * n :] = np.inf
        scores[row, done * n :] = 0.0


@njit(nogil=True)
def _distinct(ids, scores, table, classes, values):
    """Writes each distinct class of a row with its first score; returns their number."""
    table[:] = -1
    count, mask = 0, len(table) - 1
    for j in range(len(ids)):
        one = ids[j]
        if one < 0:
            continue
        slot = (one * GOLDEN >> 40) & mask
        at = table[slot]
        # No branch on whether a class is a duplicate, which is unpredictable.
        while (at >= 0) & (classes[max(at, 0)] != one):
            slot = (slot + 1) & mask
            at = table[slot]
        classes[count], values[count] = one, scores[j]
        table[slot] = count if at < 0 else at
        count += at < 0
    return count


@njit(nogil=True)
def _softmax(values):
    """Softmax in place; returns False if there are no probabilities."""
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
    """Scratch memory of :func:`_distinct`: hash table, classes, and their scores."""
    return np.empty(2 << _log2(m), np.int32), np.empty(m + 1, np.int64), np.empty(m + 1)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _slope_rows(
    start, stop, context, ids, scores, mixture, table, unigram, lists, lists_2, known, slopes
):  # fmt: skip
    slots, classes, target = _room(ids.shape[1])
    listed, values = np.empty((2, _SLOTS), np.int32), np.empty((2, lists[1].shape[1]))
    parts, room = np.empty((4, ids.shape[1])), np.empty((5, ids.shape[1]), np.int64)
    for row in range(start, stop):
        slopes[row] = 0.0
        count = _distinct(ids[row], scores[row], slots, classes, target)
        known[row] = _softmax(target[:count])
        if not known[row] or context[row, -1] < 0:
            continue
        place = _open(lists, context[row], 0, len(unigram), listed[0], values[0])
        place_2 = _open(lists_2, context[row], 1, len(unigram), listed[1], values[1])
        parts[:, :count] = 0.0
        some = classes[:count]
        for j in range(count):
            parts[0, j] = np.float64(unigram[some[j]])
        _add_parts(1.0, some, unigram, lists[1][place], values[0], listed[0], room, parts[1])
        if len(mixture) > 2:
            _add_parts(
                1.0, some, unigram, lists_2[1][place_2], values[1], listed[1], room, parts[2]
            )
        _slopes(mixture, parts, target[:count], slopes[row])


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _slopes(mixture, parts, target, slopes):
    """The gradient of the KL divergence within the classes, for each part of the mixture.

    The last row of ``parts`` is scratch memory.
    """
    mixed, within, count = parts[3], 0.0, len(target)
    mixed[:count] = 0.0
    for k in range(len(mixture)):
        share, part = np.float64(mixture[k]) / PARTS, parts[k]
        for j in range(count):
            mixed[j] += share * part[j]
    for j in range(count):
        within += mixed[j]
    for j in range(count):
        mixed[j] = target[j] / mixed[j] - 1.0 / within
    for k in range(len(mixture)):
        total, part = 0.0, parts[k]
        for j in range(count):
            total += mixed[j] * part[j]
        slopes[k] = total


@njit(nogil=True, cache=True)
def _teachers_(k, context, known, n_classes, keys):
    """The last row of each context, which updates its list, and the list's place; adds new keys."""
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
            if at == len(keys) - 1 and keys[way] == NO_KEY:
                keys[way] = key
                at = way
        if at < len(keys) - 1:
            teachers[found], place[found] = row, at
            found += 1
    return teachers[:found], place[:found]


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _merge_rows(start, stop, teachers, place, ids, scores, unigram, lists, rate):
    m, width = ids.shape[1], lists[1].shape[1]
    slots, found, target = _room(m)
    ranked, merged = np.empty(m, np.int64), np.empty(m + width, np.int64)
    is_new, value = np.empty(m + width, np.int64), np.empty(m + width)
    weight, matters, ranks = np.empty(m + width), np.empty(m + width), np.empty(m + width)
    for i in range(start, stop):
        row, at = teachers[i], place[i]
        count = _distinct(ids[row], scores[row], slots, found, target)
        _softmax(target[:count])
        for j in range(count):
            ranked[j] = found[j] << 32 | j
        ranked[:count].sort()
        classes, end, mass = lists[1][at], lists[2][at], np.float64(lists[3][at])
        # Merges two ascending lists. A class on both counts as new; its probability is moved below.
        size, old, before, total = 0, 0, np.int64(0), 0.0
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
                    merged[size], value[size], is_new[size] = classes[old], share, 0
                    weight[size] = np.float64(unigram[classes[old]])
                    size += 1
                before = end[old]
                old += 1
            if j < count:
                merged[size], value[size], weight[size] = one, part, own
                # The index of its score plus 1, since 0 means that a class is not new.
                is_new[size] = 1 + (ranked[j] & 0xFFFFFFFF)
                total += part
                size += 1
        for j in range(size):
            if is_new[j]:
                value[j] += rate * (total * target[is_new[j] - 1] - value[j])
        if size > width:
            for j in range(size):
                matters[j] = ranks[j] = abs(value[j] - weight[j])
            size = _keep(width, ranks[:size], matters, merged, value, is_new)
        _write_list(merged[:size], value[:size], unigram, at, lists)


@njit(nogil=True)
def _keep(width, ranks, matters, merged, value, is_new):
    """Keeps the ``width`` entries that matter most, in order; of equal ones, old before new."""
    size = len(ranks)
    least = _nth_largest(ranks, width)
    spare = width
    for j in range(size):
        spare -= matters[j] > least
    kept_old = 0
    for j in range(size):
        kept_old += matters[j] == least and is_new[j] == 0
    kept_old = min(kept_old, spare)
    kept_new, kept = spare - kept_old, 0
    for j in range(size):
        take = matters[j] > least
        if matters[j] == least and is_new[j] == 0 and kept_old > 0:
            take, kept_old = True, kept_old - 1
        elif matters[j] == least and is_new[j] != 0 and kept_new > 0:
            take, kept_new = True, kept_new - 1
        if take:
            merged[kept], value[kept] = merged[j], value[j]
            kept += 1
    return kept


@njit(nogil=True)
def _nth_largest(values, n):
    """The n-th largest number; reorders the values."""
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
    """Writes a list; its shares are integers of at least 1, and the largest absorbs rounding."""
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
