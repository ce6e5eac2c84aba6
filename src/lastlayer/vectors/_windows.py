"""The loop over the windows of a text, compiled by Numba and cached on disk.

For a centre word, with a reduced window b drawn from 1 to ``window``, the inputs X are the vectors
of up to 2b words around it that subsampling keeps (skip-gram: each of them, CBOW: their mean). The
outputs Y are the vectors of the centre word and its negatives, or of the nodes on its path. One
window is one step of gradient descent, with scores, factors and both updates as small matrix
products::

    S = X Yᵀ        F = lr · −∂loss/∂S        X += F Y        Y += Fᵀ X

Both updates use the old X and Y. A word that occurs twice in a window gets both updates, and a
negative that was drawn twice is one output with weight 2.

Every random decision is a function of seed, epoch and position in the text only. So a text may be
cut into jobs anywhere, even within a sentence; words beyond a cut are still read as context.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from lastlayer.vectors._vectorized import (
    BLOCK,
    add_rows,
    clear_row,
    dots,
    exp,
    prefetch_row,
    sigmoid,
)

NEGATIVE, SOFTMAX, PATHS, TREE = range(4)
"""Objectives. PATHS is a binary tree with one path per word, TREE any other tree."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_A, _B, _C = np.uint64(30), np.uint64(27), np.uint64(31)
_HALF, _WORD, _LONG = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(64)
_FAST = {"nogil": True, "fastmath": {"contract"}, "error_model": "numpy"}


class Plan(NamedTuple):
    """Constant input of all jobs; arrays that the objective does not use are empty."""

    keep: NDArray[np.uint32]
    """Per word: a token is kept if its 32 random bits are at most this."""
    alias: NDArray[np.int64]
    """The alias table of :class:`lastlayer.samplers.Unigram`."""
    log_q: NDArray[np.float64]
    """Log-probabilities of the negatives."""
    class_start: NDArray[np.int64]
    path_start: NDArray[np.int64]
    path_node: NDArray[np.int32]
    path_position: NDArray[np.int32]
    node_row: NDArray[np.int64]
    """The first output row of each node, and the end of the last."""
    seed: np.uint64
    alias_bits: int
    objective: int
    most_outputs: int
    window: int
    cbow: bool
    n_negatives: int
    share: int


@njit(nogil=True, inline="always")
def _mix(z):
    """The bijection of 64-bit integers of SplitMix64."""
    z = (z ^ (z >> _A)) * _FIRST
    z = (z ^ (z >> _B)) * _SECOND
    return z ^ (z >> _C)


@njit(nogil=True, inline="always")
def _kept(word, random, keep):
    return np.uint32(random >> _HALF) <= keep[word]


@njit(nogil=True)
def _kept_words(tokens, start, stop, key, plan, word, place):
    """Writes the kept words of a job at ``[window, last)``, and up to ``window`` words around them.

    -1 is the end of a sentence. Returns the start of the words before, ``last``, and the end of the
    words after.
    """
    begin = plan.window
    at = start - 1
    while begin > 0 and at >= 0 and tokens[at] >= 0:
        if _kept(tokens[at], _mix(key + np.uint64(at) * _GOLDEN), plan.keep):
            begin -= 1
            word[begin] = tokens[at]
        at -= 1
    last = plan.window
    for at in range(start, stop):
        word[last] = tokens[at]
        place[last] = at
        if tokens[at] < 0:
            last += 1
        else:
            last += _kept(tokens[at], _mix(key + np.uint64(at) * _GOLDEN), plan.keep)
    end = last
    at = stop
    while end < last + plan.window and at < len(tokens) and tokens[at] >= 0:
        if _kept(tokens[at], _mix(key + np.uint64(at) * _GOLDEN), plan.keep):
            word[end] = tokens[at]
            end += 1
        at += 1
    return begin, last, end


@njit(nogil=True)
def _near(word, i, begin, end, here):
    """Finds the words of ``[begin, end)`` in the sentence of the centre i; returns their number."""
    n = 0
    j = i - 1
    while j >= begin and word[j] >= 0:
        here[n] = word[j]
        n += 1
        j -= 1
    j = i + 1
    while j < end and word[j] >= 0:
        here[n] = word[j]
        n += 1
        j += 1
    return n


@njit(nogil=True, inline="always")
def _drawn(r, plan):
    """The negative chosen by 64 random bits."""
    column = r >> (_LONG - np.uint64(plan.alias_bits))
    entry = np.uint64(plan.alias[column])
    return np.int64(column if (r & _WORD) < (entry & _WORD) else entry >> _HALF)


@njit(nogil=True)
def _draw(centre, state, plan, rows, weight):
    """Draws negatives: distinct rows, the centre first, and how often each was drawn.

    Draws equal to the centre are ignored. Returns the number of rows, and the next random state.
    """
    rows[0] = centre
    weight[0] = 1
    n = 1
    for _ in range(plan.n_negatives):
        state += _GOLDEN
        drawn = _drawn(_mix(state), plan)
        same = n
        for other in range(n):
            if rows[other] == drawn:
                same = other
        if same == n:
            rows[n] = drawn
            weight[n] = 1
            n += 1
        elif same > 0:
            weight[same] += 1
    return n, state


@njit(nogil=True)
def _path(centre, plan, rows, label):
    """Rows and labels of all nodes on the paths of a word; returns the number of rows."""
    n = 0
    first, stop = plan.class_start[centre], plan.class_start[centre + 1]
    for step in range(plan.path_start[first], plan.path_start[stop]):
        node, position = plan.path_node[step], plan.path_position[step]
        row, end = plan.node_row[node], plan.node_row[node + 1]
        binary = end - row == 1
        for k in range(end - row):
            rows[n] = row + k
            label[n] = position if binary else position == k
            n += 1
    return n


@njit(**_FAST)
def _sigmoid_factors(scores, n_inputs, stride, label, weight, factors):
    """Factors for binary cross entropies: each output is an independent decision."""
    # Two loops, the first in place, so that LLVM vectorises both.
    for i in range(n_inputs * stride):
        scores[i] = sigmoid(scores[i])
    for at in range(0, n_inputs * stride, stride):
        for o in range(0, stride, BLOCK):
            for k in range(o, o + BLOCK):
                factors[at + k] = weight[k] * (label[k] - scores[at + k])


@njit(**_FAST)
def _softmax_factors(scores, n_inputs, stride, n, shift, rate, factors):
    """Factors for a softmax over ``scores + shift``, whose target is the first output."""
    for at in range(0, n_inputs * stride, stride):
        top = scores[at] + shift[0]
        for o in range(1, n):
            top = max(top, scores[at + o] + shift[o])
        total = shift.dtype.type(0)
        for o in range(n):
            factors[at + o] = exp(scores[at + o] + shift[o] - top)
            total += factors[at + o]
        for o in range(n):
            factors[at + o] *= -rate / total
        factors[at] += rate


@njit(**_FAST)
def _tree_factors(scores, n_inputs, stride, centre, plan, label, rate, log_path, factors):
    """Factors for a softmax at each node; several paths are weighted by their probabilities."""
    first, stop = plan.class_start[centre], plan.class_start[centre + 1]
    for at in range(0, n_inputs * stride, stride):
        o = 0
        for path in range(first, stop):
            log_p = 0.0
            for step in range(plan.path_start[path], plan.path_start[path + 1]):
                node = plan.path_node[step]
                size = plan.node_row[node + 1] - plan.node_row[node]
                if size == 1:
                    right = sigmoid(scores[at + o])
                    factors[at + o] = label[o] - right
                    log_p += np.log(right if label[o] == 1 else sigmoid(-scores[at + o]))
                else:
                    top = scores[at + o]
                    for k in range(o + 1, o + size):
                        top = max(top, scores[at + k])
                    total = 0.0
                    for k in range(o, o + size):
                        factors[at + k] = exp(scores[at + k] - top)
                        total += factors[at + k]
                    for k in range(o, o + size):
                        factors[at + k] = label[k] - factors[at + k] / total
                        if label[k] == 1:
                            log_p += scores[at + k] - top - np.log(total)
                o += size
            log_path[path - first] = log_p
        best = log_path[0]
        for path in range(1, stop - first):
            best = max(best, log_path[path])
        total = 0.0
        for path in range(stop - first):
            total += np.exp(log_path[path] - best)
        o = 0
        for path in range(first, stop):
            share = rate * np.exp(log_path[path - first] - best) / total
            for step in range(plan.path_start[path], plan.path_start[path + 1]):
                node = plan.path_node[step]
                for _ in range(plan.node_row[node + 1] - plan.node_row[node]):
                    factors[at + o] *= share
                    o += 1


@njit(**_FAST)
def _shifts(rows, n, plan, weight, shift):
    """Shifts of the sampled softmax: log of the number of words that each draw represents."""
    centre = rows[0]
    total = 0.0
    for o in range(1, n):
        total += weight[o]
    rest = np.log1p(-np.exp(plan.log_q[centre])) - np.log(total)
    shift[0] = 0
    for o in range(1, n):
        shift[o] = np.log(np.float64(weight[o])) + rest - plan.log_q[rows[o]]


@njit(**_FAST)
def _update(inputs, input_rows, copies, order, n_inputs, outputs, rows, n, stride, factors):
    """Both updates, with the old rows: inputs were copied, and outputs are updated last."""
    for o in range(0, n, BLOCK):
        size = min(BLOCK, n - o)
        add_rows(size, outputs, rows, o, n_inputs, inputs, input_rows, factors, o, stride, 1)
    for c in range(0, n_inputs, BLOCK):
        size = min(BLOCK, n_inputs - c)
        add_rows(size, copies, order, c, n, outputs, rows, factors, c * stride, 1, stride)


@njit(cache=True, **_FAST)
def train_span(tokens, start, stop, epoch, rate, slope, inputs, outputs, copies, plan):
    """Trains on centre words at ``[start, stop)``, with learning rate ``rate + slope * place``."""
    number = inputs.dtype.type
    most = 2 * plan.window
    stride = -(-plan.most_outputs // BLOCK) * BLOCK
    word = np.empty(stop - start + most, np.int64)
    place = np.empty(stop - start + most, np.int64)
    order = np.arange(most + 1)
    here = np.empty(most, np.int64)
    rows = np.empty(stride, np.int64)
    label, weight = np.zeros(stride, inputs.dtype), np.zeros(stride, inputs.dtype)
    shift, log_path = np.empty(stride, inputs.dtype), np.empty(stride)
    scores, factors = np.zeros(most * stride, inputs.dtype), np.zeros(most * stride, inputs.dtype)
    key = _mix(plan.seed + np.uint64(2 * epoch + 1) * _GOLDEN)
    drawn_key = _mix(plan.seed + np.uint64(2 * epoch + 2) * _GOLDEN)
    own = plan.share == 0
    there = np.empty(1, np.int64) if own else here
    mean_row, part = order[most:], np.empty(1, inputs.dtype)

    begin, last, end = _kept_words(tokens, start, stop, key, plan, word, place)
    for i in range(plan.window, last):
        centre = word[i]
        if centre < 0:
            continue
        r = _mix(key + np.uint64(place[i]) * _GOLDEN)
        reach = 1 + np.int64(((r & _WORD) * np.uint64(plan.window)) >> _HALF)
        n_words = _near(word, i, max(begin, i - reach), min(end, i + reach + 1), here)
        if n_words == 0:
            continue
        if plan.objective < PATHS and i + 1 < last and word[i + 1] >= 0:
            ahead = _mix(drawn_key + np.uint64(place[i + 1] // max(1, plan.share)) * _GOLDEN)
            for _ in range(plan.n_negatives):
                ahead += _GOLDEN
                prefetch_row(outputs, _drawn(_mix(ahead), plan))
        if i + plan.window + 1 < end and word[i + plan.window + 1] >= 0:
            prefetch_row(inputs, word[i + plan.window + 1])
        lr = number(rate + slope * place[i])
        group = place[i] // max(1, plan.share)
        state = _mix(drawn_key + np.uint64(group) * _GOLDEN)
        n_inputs = 1 if plan.cbow or own else n_words
        for first in range(n_words if own else 1):
            if plan.objective >= PATHS:
                n = _path(centre, plan, rows, label)
            else:
                n, state = _draw(centre, state, plan, rows, weight)
            wide = -(-n // BLOCK) * BLOCK
            if plan.cbow:
                part[0] = number(1) / number(n_words)
                clear_row(copies, 0)
                for c in range(0, n_words, BLOCK):
                    size = min(BLOCK, n_words - c)
                    add_rows(size, inputs, here, c, 1, copies, order, part, 0, 0, 0)
                for o in range(0, n, BLOCK):
                    size = min(BLOCK, n - o)
                    dots(size, outputs, rows, o, 1, copies, order, copies, scores, o, wide)
            else:
                if own:
                    there[0] = here[first]
                for o in range(0, n, BLOCK):
                    size = min(BLOCK, n - o)
                    dots(size, outputs, rows, o, n_inputs, inputs, there, copies, scores, o, wide)
            if plan.objective == NEGATIVE:
                label[0] = 1
                for o in range(n):
                    weight[o] *= lr
                weight[n:wide] = 0
                _sigmoid_factors(scores, n_inputs, wide, label, weight, factors)
            elif plan.objective == PATHS:
                weight[:n] = lr
                weight[n:wide] = 0
                _sigmoid_factors(scores, n_inputs, wide, label, weight, factors)
            elif plan.objective == SOFTMAX:
                _shifts(rows, n, plan, weight, shift)
                _softmax_factors(scores, n_inputs, wide, n, shift, lr, factors)
            else:
                _tree_factors(scores, n_inputs, wide, centre, plan, label, lr, log_path, factors)
            if plan.cbow:
                clear_row(copies, most)
                _update(copies, mean_row, copies, order, 1, outputs, rows, n, wide, factors)
                add_rows(1, copies, order, most, n_words, inputs, here, part, 0, 0, 0)
            else:
                _update(inputs, there, copies, order, n_inputs, outputs, rows, n, wide, factors)
