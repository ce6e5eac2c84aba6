"""Softmax at the nodes of a tree on the CPU: all small groups in one call, and all leaves of rows.

For a group with many rows, torch's matrix product is faster. For the many small groups, calling a
product takes longer than its arithmetic. README.md has the derivation.
"""

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from lastlayer._torch import as_numpy
from lastlayer.kernels._cpu import by_rows
from lastlayer.kernels._cpu_math import (
    BLOCK,
    FAST,
    add_scaled,
    dot,
    exp,
    lanes_of,
    largest,
    log,
    top_of,
)

# Number of multiplications that cost as much as one entry of an element-wise kernel.
_WORK = 8
Array = NDArray[Any]


def choose(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, first: Array, last: Array,
    row: Array, width: Array, position: Tensor, made: Tensor,
) -> None:  # fmt: skip
    """Writes the log-probability of each entry's child to ``made``, ``(n, m)``.

    Args:
        hidden: ``(n, d)``; entry i belongs to row ``i // m``.
        weight: the vectors of all nodes.
        bias: one number per vector, or None.
        order: entries sorted by their nodes.
        first: the start of each group in ``order``.
        last: the end of each group in ``order``.
        row: the first vector of each group's node.
        width: the number of vectors of each group's node: 1 for a binary node, for its second
            child.
        position: the child of each entry, ``(n * m,)``.
        made: log-probabilities; entries that are in no group are unchanged.
    """
    _choose(
        *_sizes(first, last, width, hidden.shape[1]), as_numpy(order), first, last, row, width,
        made.shape[1], *_arrays(hidden, weight, bias), as_numpy(position), as_numpy(made.view(-1)),
    )  # fmt: skip


def gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, first: Array, last: Array,
    row: Array, width: Array, position: Tensor, made: Tensor, upstream: Tensor, place: Array,
    of_entries: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None,
) -> None:  # fmt: skip
    """:func:`choose`, and its gradients.

    Those of hidden states are one per entry, ``(n, m, d)``. Those of a group's vectors and biases
    are written from row ``place`` on. ``upstream`` is ``(n * m,)``; other arguments are those of
    :func:`choose`.
    """
    n_groups, work = _sizes(first, last, width, hidden.shape[1])
    none, d = hidden.new_empty(0), hidden.shape[1]
    _gradients(
        n_groups, 3 * work, as_numpy(order), first, last, row, width, made.shape[1],
        *_arrays(hidden, weight, bias), as_numpy(position), as_numpy(made.view(-1)),
        as_numpy(upstream.detach().contiguous()), place,
        as_numpy((none if of_entries is None else of_entries).view(-1, d)),
        as_numpy(none.view(-1, d) if of_weight is None else of_weight),
        as_numpy(none if of_bias is None else of_bias),
    )  # fmt: skip


def _sizes(first: Array, last: Array, width: Array, depth: int) -> tuple[int, int]:
    """The number of groups, and the average cost of a group."""
    n = len(first)
    return n, int(((last - first) * width).sum()) * depth // (_WORK * max(1, n))


def leaves(
    scores: Tensor, child_start: Tensor, row_start: Tensor, child: Tensor, end: Tensor, made: Tensor
) -> None:
    """As the reference, but writes to ``made``.

    Nodes must be numbered level by level, so that a node comes after its parent.
    """
    _leaves(
        *scores.shape, as_numpy(scores.detach().contiguous()), as_numpy(child_start),
        as_numpy(row_start), as_numpy(child), as_numpy(end), as_numpy(made),
    )  # fmt: skip


def _arrays(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Array, Array, Array]:
    biases = hidden.new_empty(0) if bias is None else bias.detach().to(hidden.dtype).contiguous()
    return as_numpy(hidden.contiguous()), as_numpy(weight.contiguous()), as_numpy(biases)


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _choose(
    start, stop, order, first, last, row, width, m, hidden, weight, bias, position, made
):  # fmt: skip
    room, lanes = _room(width), np.empty(BLOCK, hidden.dtype)
    scores, shares = np.empty(room, hidden.dtype), np.empty(room, hidden.dtype)
    for group in range(start, stop):
        for at in range(first[group], last[group]):
            entry = order[at]
            used = _score(hidden[entry // m], weight, bias, row[group], width[group], scores)
            peak, rest = _log_total(scores[:used], shares, lanes)
            made[entry] = (scores[position[entry]] - peak) - rest


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _gradients(
    start, stop, order, first, last, row, width, m, hidden, weight, bias, position, made, upstream,
    place, of_entries, of_weight, of_bias,
):  # fmt: skip
    room, lanes = _room(width), np.empty(BLOCK, hidden.dtype)
    scores, shares = np.empty(room, hidden.dtype), np.empty(room, hidden.dtype)
    zero = hidden.dtype.type(0.0)
    for group in range(start, stop):
        top, n = place[group], width[group]
        if len(of_weight):
            of_weight[top : top + n] = zero
        if len(of_bias):
            of_bias[top : top + n] = zero
        for at in range(first[group], last[group]):
            entry = order[at]
            state, factor = hidden[entry // m], upstream[entry]
            used = _score(state, weight, bias, row[group], n, scores)
            peak, rest = _log_total(scores[:used], shares, lanes)
            made[entry] = (scores[position[entry]] - peak) - rest
            if len(of_entries):
                of_entries[entry, :] = zero
            # A binary node only has a vector for its second child.
            for i in range(used - n, used):
                slope = -factor * math.exp((scores[i] - peak) - rest)
                if i == position[entry]:
                    slope += factor
                c = i - (used - n)
                if len(of_entries):
                    add_scaled(of_entries[entry], slope, weight[row[group] + c])
                if len(of_weight):
                    add_scaled(of_weight[top + c], slope, state)
                if len(of_bias):
                    of_bias[top + c] += slope


@njit(nogil=True)
def _room(width):
    most = 2
    for each in width:
        most = max(most, each)
    return most


@njit(nogil=True)
def _score(state, weight, bias, first, n, scores):
    """Writes the scores of all children of a node; returns their number."""
    shift = 1 if n == 1 else 0
    scores[0] = 0.0
    for i in range(n):
        score = dot(state, weight[first + i])
        scores[i + shift] = score + bias[first + i] if len(bias) else score
    return n + shift


@njit(nogil=True, fastmath=FAST, error_model="numpy")
def _exp_sum(scores, peak, shares):
    total = scores.dtype.type(0.0)
    for i in range(len(scores)):
        shares[i] = exp(scores[i] - peak)
    for i in range(len(scores)):
        total += shares[i]
    return total


@njit(nogil=True, error_model="numpy")
def _log_total(scores, shares, lanes):
    """The largest score, and the logsumexp of the scores less the largest score."""
    peak = largest(scores, lanes, scores.dtype.type(-math.inf))
    return peak, scores.dtype.type(math.log(_exp_sum(scores, peak, shares)))


@by_rows
@njit(nogil=True, cache=True, error_model="numpy")
def _leaves(start, stop, rows, child_start, row_start, child, end, made):
    n_inner, n_edges = len(child_start) - 1, len(child)
    widest, binary = 0, False
    for node in range(n_inner):
        widest = max(widest, child_start[node + 1] - child_start[node])
        binary = binary or child_start[node + 1] - child_start[node] == 2
    # The edge above each node; the edge above the root is last. Unsigned indices are faster.
    above, ends = np.full(n_inner, n_edges, np.uint32), end.view(np.uint32)
    for edge in range(n_edges):
        if child[edge] >= 0:
            above[child[edge]] = edge
    edges = np.zeros(n_edges + 1, rows.dtype)
    rests = np.empty(row_start[n_inner] if binary else 0, rows.dtype)
    shares, lanes, real = np.empty(widest, rows.dtype), lanes_of(rows.itemsize), rows.dtype.type
    zero = real(0.0)
    for row in range(start, stop):
        if binary:
            _log_rests(rows[row], rests)
        if n_edges == 2 * n_inner:
            _binary_edges(rows[row], rests, above, edges)
        for node in range(0 if n_edges == 2 * n_inner else n_inner):
            edge, first, so_far = child_start[node], row_start[node], edges[above[node]]
            n = child_start[node + 1] - edge
            if n == 2:
                score = rows[row, first]
                so_far -= rests[first]
                edges[edge] = so_far - (score if score > zero else zero)
                edges[edge + 1] = so_far + (score if score < zero else zero)
            else:
                some = rows[row, first : first + n]
                peak, _ = top_of(rows, row, first, n // lanes)
                for i in range(n // lanes * lanes, n):
                    peak = some[i] if some[i] > peak else peak
                so_far -= real(math.log(_exp_sum(some, peak, shares)))
                below = edges[edge : edge + n]
                for i in range(n):
                    below[i] = (some[i] - peak) + so_far
        leaves = made[row]
        for leaf in range(len(ends)):
            leaves[leaf] = edges[ends[leaf]]


@njit(nogil=True, error_model="numpy")
def _binary_edges(scores, rests, above, edges):
    """Writes the log-probabilities of all edges of a binary tree."""
    zero = scores.dtype.type(0.0)
    for node in range(len(rests)):
        score, so_far = scores[node], edges[above[node]] - rests[node]
        edges[2 * node] = so_far - max(score, zero)
        edges[2 * node + 1] = so_far + min(score, zero)


@njit(nogil=True, error_model="numpy")
def _log_rests(scores, rests):
    """``log(1 + exp(-|score|))``, precise even if the exponential is small compared with 1."""
    one = scores.dtype.type(1.0)
    for i in range(len(rests)):
        small = exp(-abs(scores[i]))
        sum_ = one + small
        # Adds the rounding error of the sum, relative to it.
        rests[i] = log(sum_) + (small - (sum_ - one)) / sum_
