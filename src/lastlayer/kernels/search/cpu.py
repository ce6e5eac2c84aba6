"""Trees on the CPU: best leaves by exact or beam search, random leaves, and given leaves.

The exact search is best-first, with a heap per row; README.md has the proof that it opens as few
nodes as possible. Beam search has only this kernel.
"""

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer._torch import accumulation_dtype, as_numpy, in_dtype
from lastlayer.kernels._cpu import by_rows
from lastlayer.kernels._cpu_math import dot
from lastlayer.kernels.search import NOWHERE

_FLOATING, _BFLOAT16, _FLOAT16 = 0, 1, 2
# Estimated number of opened nodes per leaf, to choose the number of threads.
_OPENED_FOR_EACH = 16


def best_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, levels: int, k: int, most: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Same as the reference, but may give rows up.

    A row is given up if it needs more than ``most`` rows of the weight, if a NaN occurs, or if
    fewer than k classes have a non-zero probability.
    """
    n, depth = hidden.shape
    values = torch.full((n, k), torch.nan, dtype=hidden.dtype)
    classes = torch.full((n, k), -1)
    opened = torch.full((n,), -1)
    # Each row of the weight adds at most one candidate, so k leaves need k - 1 rows.
    if n and k <= most + 1:
        arrays = _as_arrays(hidden, weight, bias, child_start, row_start, child)
        results = as_numpy(values), as_numpy(classes), as_numpy(opened)
        _search_rows(n, k * _OPENED_FOR_EACH * depth, *arrays, most, *results)
    return values, classes, opened


@by_rows
@njit(nogil=True, cache=True)
def _search_rows(start, stop, hidden, nodes, child, most, values, classes, opened):
    """Opens the most probable node until k leaves have reached the top of the heap.

    The heap has the children of opened nodes, including leaves, with the most probable on top. A
    leaf on top is the next best of all, since nothing below a node is more probable than the node.
    """
    k, child_start, row_start = values.shape[1], nodes[4], nodes[5]
    # Opening a node removes one entry and adds its children: one per row, or two for a single row.
    heap = np.empty(most + 2, hidden.dtype), np.empty(most + 2, np.int32)
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        size = _push(heap, 0, hidden.dtype.type(0.0), np.int32(0))
        found, n_opened, read = 0, 0, 0
        while size > 0 and found < k:
            reached, at = heap[0][0], heap[1][0]
            size = _pop(heap, size)
            if at < 0:
                values[row, found], classes[row, found] = reached, ~at
                found += 1
                continue
            read += row_start[at + 1] - row_start[at]
            if read > most:
                break
            n_opened += 1
            below, whole = _open_node(hidden[row], nodes, at, widened, below)
            if not whole:
                break
            for edge in range(child_start[at], child_start[at + 1]):
                if below[edge - child_start[at]] > -np.inf:
                    log_prob = reached + below[edge - child_start[at]]
                    size = _push(heap, size, log_prob, child[edge])
        if found == k:
            opened[row] = n_opened
        else:
            values[row, :], classes[row, :] = np.nan, -1


def beam_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, k: int, width: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Log-probabilities and classes ``(n, k)``, and how many nodes were opened ``(n,)``.

    Beam search, which is not exact. Missing results have value -inf and class -1; after a NaN all
    values of the row are NaN. Arguments are those of :func:`best_leaves`, and ``width``, the number
    of nodes per level, at least k.
    """
    n, depth = hidden.shape
    values = torch.full((n, k), -torch.inf, dtype=hidden.dtype)
    classes = torch.full((n, k), -1)
    opened = torch.zeros(n, dtype=torch.int64)
    if n:
        arrays = _as_arrays(hidden, weight, bias, child_start, row_start, child)
        results = as_numpy(values), as_numpy(classes), as_numpy(opened)
        _beam_rows(n, width * depth, *arrays, width, *results)
    return values, classes, opened


@by_rows
@njit(nogil=True, cache=True)
def _beam_rows(start, stop, hidden, nodes_of, child, width, values, classes, opened):
    child_start = nodes_of[4]
    # The nodes of this level, and a heap of the nodes of the next level.
    nodes, log_probs = np.empty(width, np.int32), np.empty(width, hidden.dtype)
    heap = np.empty(2 * width, hidden.dtype), np.empty(2 * width, np.int32)
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        nodes[0], log_probs[0], n_nodes, whole = 0, 0.0, 1, True
        while n_nodes > 0 and whole:
            size = 0
            for i in range(n_nodes):
                at = nodes[i]
                arity = child_start[at + 1] - child_start[at]
                if width * arity > len(heap[0]):
                    heap = _grown(heap[0], width * arity), _grown(heap[1], width * arity)
                below, fine = _open_node(hidden[row], nodes_of, at, widened, below)
                whole &= fine
                for j in range(arity):
                    log_prob, to = log_probs[i] + below[j], child[child_start[at] + j]
                    if log_prob > -np.inf and to < 0:
                        _keep(values[row], classes[row], log_prob, ~to)
                    elif log_prob > -np.inf:
                        size = _push(heap, size, log_prob, to)
            opened[row] += n_nodes
            n_nodes = 0
            while size > 0 and n_nodes < width and heap[0][0] >= values[row, -1]:
                log_probs[n_nodes], nodes[n_nodes] = heap[0][0], heap[1][0]
                n_nodes += 1
                size = _pop(heap, size)
        if not whole:
            values[row, :], classes[row, :] = np.nan, -1


@njit(nogil=True)
def _grown(array, size):
    grown = np.empty(size, array.dtype)
    grown[: len(array)] = array
    return grown


@njit(nogil=True)
def _keep(values, classes, value, found):
    """Inserts a leaf into the sorted list of the best; ties are ordered by class."""
    i = len(values) - 1
    if value < values[i] or (value == values[i] and found > classes[i]):
        return
    while i > 0 and (values[i - 1] < value or (values[i - 1] == value and classes[i - 1] > found)):
        values[i], classes[i] = values[i - 1], classes[i - 1]
        i -= 1
    values[i], classes[i] = value, found


def random_leaves(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    child: Tensor, widest: int, uniform: Tensor,
) -> Tensor:  # fmt: skip
    classes = torch.zeros(uniform.shape, dtype=torch.int64)
    if classes.numel():
        arrays = _as_arrays(hidden, weight, bias, child_start, row_start, child)
        work = uniform.shape[1] * hidden.shape[1]
        # The kernel overwrites each number with its position in the interval of its node.
        _draw_rows(uniform.shape[0], work, *arrays, as_numpy(uniform.clone()), as_numpy(classes))
    return classes


@by_rows
@njit(nogil=True, cache=True)
def _draw_rows(start, stop, hidden, nodes, child, left, at):
    child_start = nodes[4]
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        # Sorted, so that walks at the same node are adjacent.
        order = np.argsort(left[row])
        going = True
        while going:
            going, known, whole = False, -1, True
            for i in order:
                node = at[row, i]
                if node < 0:
                    continue
                arity = child_start[node + 1] - child_start[node]
                if node != known:
                    below, whole = _open_node(hidden[row], nodes, node, widened, below)
                    known = node
                if whole:
                    drawn, left[row, i] = _drawn(below, arity, left[row, i])
                    at[row, i] = child[child_start[node] + drawn]
                    going |= at[row, i] >= 0
                else:
                    at[row, i] = NOWHERE
        for i in range(at.shape[1]):
            at[row, i] = -1 if at[row, i] == NOWHERE else ~at[row, i]


@njit(nogil=True)
def _drawn(log_probs, arity, left):
    """The child whose interval the number falls into, and the position in that interval.

    Sums are in float64, so that many small probabilities are not lost.
    """
    total = 0.0
    for i in range(arity):
        total += math.exp(np.float64(log_probs[i]))
    limit = left * total
    reached, last = 0.0, 0
    for i in range(arity):
        share = math.exp(np.float64(log_probs[i]))
        reached += share
        if share > 0.0:
            last = i
            if reached > limit:
                return i, min(max((limit - (reached - share)) / share, 0.0), 1.0)
    # Only if the product was rounded up to the total.
    return last, 1.0


def leaf_log_probs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    edge_node: Tensor, path_start: Tensor, path_edge: Tensor, widest: int,
    classes: Tensor,
) -> Tensor:  # fmt: skip
    made = torch.empty(classes.shape, dtype=accumulation_dtype(hidden.dtype))
    if made.numel():
        tables = child_start, row_start, edge_node, path_start, path_edge, classes
        arrays = _as_arrays(hidden, weight, bias, *tables)
        _follow_rows(made.shape[0], made.shape[1] * hidden.shape[1], *arrays, as_numpy(made))
    return made


@by_rows
@njit(nogil=True, cache=True)
def _follow_rows(start, stop, hidden, nodes, edge_node, path_start, path_edge, classes, made):
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        for i in range(classes.shape[1]):
            chosen = classes[row, i]
            made[row, i] = 0.0
            if chosen < 0 or chosen >= len(path_start) - 1:
                made[row, i] = np.nan
                continue
            for place in range(path_start[chosen], path_start[chosen + 1]):
                edge = path_edge[place]
                node = edge_node[edge]
                below, _ = _open_node(hidden[row], nodes, node, widened, below)
                made[row, i] += below[edge - nodes[4][node]]


def _as_arrays(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, child_start: Tensor, row_start: Tensor,
    *tables: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Hidden states, the ``nodes`` argument of :func:`_open_node`, and other tables, as arrays.

    Numba does not support half precision; such a weight is passed as bits.
    """
    hidden, weight = in_dtype(hidden, accumulation_dtype(hidden.dtype)), weight.detach()
    numbers, bits, kind = np.empty((0, 0), np.float32), np.empty((0, 0), np.int16), _FLOATING
    if weight.dtype in (torch.float32, torch.float64):
        numbers = as_numpy(weight)
    else:
        kind = _BFLOAT16 if weight.dtype == torch.bfloat16 else _FLOAT16
        bits = as_numpy(weight.view(torch.int16))
    biases = hidden.new_empty(0) if bias is None else bias.detach().to(hidden).contiguous()
    starts, rows, *others = (
        as_numpy(each.contiguous()) for each in (child_start, row_start, *tables)
    )
    nodes = numbers, bits, kind, as_numpy(biases), starts, rows
    return as_numpy(hidden.detach().contiguous()), nodes, *others


@njit(nogil=True)
def _open_node(state, nodes, node, widened, below):
    """Log-probabilities of the children, at most 0; and whether there is no NaN.

    ``below`` is a buffer for them, which is replaced if it is too small.
    """
    weight, bits, kind, bias, child_start, row_start = nodes
    arity = child_start[node + 1] - child_start[node]
    if arity > len(below):
        below = np.empty(arity, below.dtype)
    for i in range(row_start[node + 1] - row_start[node]):
        at = row_start[node] + i
        if kind == _FLOATING:
            score = dot(state, weight[at])
        else:
            if kind == _BFLOAT16:
                _widen_bfloat16(bits[at], widened)
            else:
                _widen_float16(bits[at], widened)
            score = dot(state, widened)
        below[i] = score + bias[at] if len(bias) else score
    return below, _to_log_probs(below, arity)


@njit(nogil=True)
def _widen_bfloat16(bits, out):
    """Converts bfloat16 bits, the upper half of a float32."""
    wide = out.view(np.int32)
    for i in range(len(bits)):
        wide[i] = np.int32(bits[i]) << np.int32(16)


@njit(nogil=True)
def _widen_float16(bits, out):
    """Converts float16 bits. Shifted bits have exponents that are too low by 112, hence 2^112."""
    wide = out.view(np.int32)
    for i in range(len(bits)):
        size = np.int32(bits[i]) & np.int32(0x7FFF)
        # An exponent of all ones is inf or NaN in both formats.
        special = np.int32(0x7F800000) if size >= np.int32(0x7C00) else np.int32(0)
        sign = (np.int32(bits[i]) & np.int32(0x8000)) << np.int32(16)
        wide[i] = sign | special | (size << np.int32(13))
    for i in range(len(bits)):
        out[i] *= np.float32(2.0**112)


@njit(nogil=True)
def _to_log_probs(below, arity):
    """Overwrites scores with log-probabilities; a binary node has a single score."""
    if arity == 2:
        score = below[0]
        rest = math.log1p(math.exp(-abs(score)))
        below[0], below[1] = min(-score, 0.0) - rest, min(score, 0.0) - rest
        return not math.isnan(score)
    top = below[0]
    for i in range(1, arity):
        top = max(top, below[i])
    total = below.dtype.type(0.0)
    for i in range(arity):
        below[i] -= top
        total += math.exp(below[i])
    rest = math.log(total)
    for i in range(arity):
        below[i] -= rest
    return not math.isnan(total)


# A max-heap of log-probabilities and ids, in two arrays. Among ties the larger id comes first.
# Nodes have ids from 0 on and class c has ``~c``: so nodes come before leaves, since a leaf below
# them may be equally probable, and lower classes before higher ones.
@njit(nogil=True)
def _before(log_probs, ids, i, j):
    if log_probs[i] == log_probs[j]:
        return ids[i] > ids[j]
    return log_probs[i] > log_probs[j]


@njit(nogil=True)
def _swap(log_probs, ids, i, j):
    log_probs[i], log_probs[j] = log_probs[j], log_probs[i]
    ids[i], ids[j] = ids[j], ids[i]


@njit(nogil=True)
def _push(heap, size, log_prob, at):
    """Adds an entry; returns the new size."""
    log_probs, ids = heap
    log_probs[size], ids[size] = log_prob, at
    i = size
    while i > 0 and _before(log_probs, ids, i, (i - 1) >> 1):
        _swap(log_probs, ids, i, (i - 1) >> 1)
        i = (i - 1) >> 1
    return size + 1


@njit(nogil=True)
def _pop(heap, size):
    """Removes the top; returns the new size."""
    log_probs, ids = heap
    size -= 1
    log_probs[0], ids[0] = log_probs[size], ids[size]
    i = 0
    while True:
        best = 2 * i + 1
        if best >= size:
            return size
        if best + 1 < size and _before(log_probs, ids, best + 1, best):
            best += 1
        if not _before(log_probs, ids, best, i):
            return size
        _swap(log_probs, ids, i, best)
        i = best
