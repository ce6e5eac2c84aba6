"""The loss along paths of a binary tree on the CPU, without gathering vectors.

Rows are processed in the order of their classes in the tree, so that adjacent rows share the
vectors of most of their nodes, and the rows of a node are one run. README.md has the derivation.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import accumulation_dtype, as_numpy
from lastlayer.kernels._cpu import as_rows, by_rows
from lastlayer.kernels._cpu_math import add_scaled, dot


def loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rank: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, longest: int, to_nodes: bool,
    to_hidden: bool, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = accumulation_dtype(hidden.dtype)
    n, depth = hidden.shape
    losses = torch.empty(n, dtype=wide)
    slopes = torch.zeros(n if to_nodes else 0, longest, dtype=wide)
    gradient = torch.empty(n if to_hidden else 0, depth, dtype=wide)
    classes = as_numpy(target.contiguous())
    ignores, ignored = ignore_index is not None, ignore_index or 0
    share = 1.0
    if mean:
        share = 1.0 / max(1, int((classes != ignored).sum()) if ignores else n)
    order = _rows_in_order(classes, as_numpy(rank), ignores, ignored)
    paths = as_numpy(path_start), as_numpy(path_edge)
    starts, edges = _paths_in_order(order, classes, *paths, ignores, ignored)
    vectors, biases = weight.detach(), None if bias is None else bias.detach()
    if vectors.dtype != wide:
        # Each touched vector is converted once, and paths are renumbered to these vectors.
        node, level, first, since = _runs_of_nodes(starts, edges, longest)
        edges = _edges_by_place(starts, edges, level, first, since)
        touched = torch.from_numpy(node)
        vectors = vectors[touched].to(wide)
        biases = None if biases is None else biases[touched]
    _loss_rows(
        n, depth * min(longest, 16), as_rows(hidden), as_rows(vectors),
        as_numpy(losses[:0] if biases is None else biases.to(wide)), order, starts, edges,
        as_numpy(losses), as_numpy(slopes), as_numpy(gradient), share,
    )  # fmt: skip
    if ignores:
        losses.masked_fill_(target == ignored, 0.0)
    return losses, torch.from_numpy(order if to_nodes else order[:0]), slopes, gradient


def to_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, n_nodes: int,
    dtype: torch.dtype, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    touched, *sums, _ = to_touched_nodes(
        slopes, factor, hidden, target, order, path_start, path_edge, path_edge, ignore_index,
        dtype, to_weight, to_bias,
    )  # fmt: skip
    made = []
    for wanted, values in zip((to_weight, to_bias), sums, strict=True):
        made.append(torch.zeros(n_nodes if wanted else 0, *values.shape[1:], dtype=dtype))
        if wanted:
            made[-1][touched[0]] = values
    return made[0], made[1]


def to_touched_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, _level_start: Tensor, ignore_index: int | None,
    dtype: torch.dtype, to_weight: bool, to_bias: bool, most: int | None = None,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    depth, ignores, ignored = hidden.shape[1], ignore_index is not None, ignore_index or 0
    starts, edges = _paths_in_order(
        as_numpy(order), as_numpy(target.contiguous()), as_numpy(path_start), as_numpy(path_edge),
        ignores, ignored,
    )  # fmt: skip
    node, level, first, since = _runs_of_nodes(starts, edges, slopes.shape[1])
    new, m = (torch.empty, len(node)) if most is None else (torch.zeros, most)
    weight = new(m if to_weight else 0, depth, dtype=slopes.dtype)
    bias = new(m if to_bias else 0, dtype=slopes.dtype)
    _sum_runs(
        int(since[-1]), depth, level, first, since, as_numpy(order), as_numpy(slopes),
        as_numpy(factor.detach().reshape(-1).contiguous()), as_rows(hidden), as_numpy(weight),
        as_numpy(bias),
    )  # fmt: skip
    touched = pad(torch.from_numpy(node), (0, m - len(node))).unsqueeze(0)
    scaled = hidden.new_empty(0, depth)
    if gradient is not None:
        scaled = (gradient * factor.reshape(-1, 1)).to(hidden.dtype)
    return touched, weight.to(dtype), bias.to(dtype), scaled


@by_rows
@njit(nogil=True, cache=True)
def _loss_rows(
    start, stop, hidden, weight, bias, order, starts, edges, losses, slopes, gradient, share
):  # fmt: skip
    """Losses, slopes and gradients of some rows, times ``share``; NaN for rows without a path."""
    scale = losses.dtype.type(share)
    for at in range(start, stop):
        row = order[at]
        state = hidden[row]
        zero, one = losses.dtype.type(0.0), losses.dtype.type(1.0)
        total = zero
        if len(gradient):
            gradient[row, :] = zero
        for entry in range(starts[at], starts[at + 1]):
            node, second = edges[entry] >> 1, edges[entry] & 1
            score = dot(state, weight[node])
            if len(bias):
                score += bias[node]
            wrong = -score if second else score
            small = math.exp(-abs(wrong))
            total += (wrong if wrong > zero else zero) + math.log1p(small)
            slope = (small if wrong < zero else one) / (one + small)
            slope = -slope * scale if second else slope * scale
            if len(slopes):
                slopes[row, entry - starts[at]] = slope
            if len(gradient):
                add_scaled(gradient[row], slope, weight[node])
        losses[row] = total * scale if starts[at] < starts[at + 1] else math.nan


@by_rows
@njit(nogil=True, cache=True)
def _sum_runs(start, stop, level, first, since, order, slopes, factor, hidden, weight, bias):
    """Sums the runs that start in a range of rows; threads share rows evenly."""
    run = np.searchsorted(since, start)
    by_row = len(factor) > 1
    while run < len(level) and since[run] < stop:
        end = first[run] + since[run + 1] - since[run]
        one = slopes.dtype.type(0.0)
        if len(weight):
            weight[run, :] = one
        for at in range(first[run], end):
            row = order[at]
            value = slopes[row, level[run]] * factor[row if by_row else 0]
            one += value
            if len(weight):
                add_scaled(weight[run], value, hidden[row])
        if len(bias):
            bias[run] = one
        run += 1


@njit(nogil=True, cache=True)
def _rows_in_order(classes, rank, ignores, ignored):
    """Rows sorted by the rank of their class, stable; rows without a class come last."""
    n = len(classes)
    keys = np.empty(n, np.int64)
    for row in range(n):
        c = classes[row]
        known = 0 <= c < len(rank) and not (ignores and c == ignored)
        keys[row] = ((rank[c] if known else len(rank)) << 32) | row
    keys.sort()
    for at in range(n):
        keys[at] &= 0xFFFFFFFF
    return keys


@njit(nogil=True, cache=True)
def _paths_in_order(order, classes, path_start, path_edge, ignores, ignored):
    """The edges of all rows in the given order, and where those of each row start, ``(n + 1,)``."""
    n, n_classes = len(order), len(path_start) - 1
    starts = np.zeros(n + 1, np.int64)
    for at in range(n):
        c = classes[order[at]]
        known = 0 <= c < n_classes and not (ignores and c == ignored)
        starts[at + 1] = starts[at] + (path_start[c + 1] - path_start[c] if known else 0)
    edges = np.empty(starts[n], path_edge.dtype)
    for at in range(n):
        first = path_start[classes[order[at]]] if starts[at] < starts[at + 1] else 0
        for place in range(starts[at], starts[at + 1]):
            edges[place] = path_edge[first + place - starts[at]]
    return starts, edges


@njit(nogil=True, cache=True)
def _runs_of_nodes(starts, edges, longest):
    """Each node on the paths, ascending: its id, level, first row, and the row count before it.

    The last is a cumulative sum, ``(m + 1,)``. Nodes are numbered level by level and from left to
    right, and rows are sorted from left to right; so order by level and first row is ascending.
    """
    n = len(starts) - 1
    shared = np.zeros(n + 1, np.int64)
    following = np.zeros(longest + 1, np.int64)
    for at in range(n):
        length = starts[at + 1] - starts[at]
        if at > 0:
            before = starts[at - 1]
            most = min(length, starts[at] - before)
            while (
                shared[at] < most
                and edges[starts[at] + shared[at]] >> 1 == edges[before + shared[at]] >> 1
            ):
                shared[at] += 1
        for level in range(shared[at], length):
            following[level + 1] += 1
    for level in range(longest):
        following[level + 1] += following[level]
    m = following[longest]
    node, level_of, first = np.empty(m, np.int64), np.empty(m, np.int64), np.empty(m, np.int64)
    since = np.zeros(m + 1, np.int64)
    latest = np.empty(longest, np.int64)
    for at in range(n):
        length = starts[at + 1] - starts[at]
        for level in range(shared[at], length):
            run = following[level]
            following[level] += 1
            node[run] = edges[starts[at] + level] >> 1
            level_of[run], first[run] = level, at
            latest[level] = run
        for level in range(shared[at + 1], length):
            since[latest[level] + 1] = at + 1 - first[latest[level]]
    for run in range(m):
        since[run + 1] += since[run]
    return node, level_of, first, since


@njit(nogil=True, cache=True)
def _edges_by_place(starts, edges, level, first, since):
    """The same edges, with nodes numbered by their position in :func:`_runs_of_nodes`."""
    placed = np.empty_like(edges)
    for run in range(len(level)):
        for at in range(first[run], first[run] + since[run + 1] - since[run]):
            place = starts[at] + level[run]
            placed[place] = (run << 1) | (edges[place] & 1)
    return placed
