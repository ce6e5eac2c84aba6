"""The loss along paths of a binary tree on the CPU: vectors are read where they are.

Rows are taken in the order of their classes in the tree, so that neighbours share the vectors of
most of their nodes, and the rows of a node are one run. README.md has the derivation.
"""

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn.functional import pad

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._arrays import as_rows
from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.tree_path._runs import (
    edges_by_place,
    paths_in_order,
    rows_in_order,
    runs_of_nodes,
)

# Sums may be reordered and so vectorised; NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}


def loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    rank: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    longest: int,
    to_nodes: bool,
    to_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the reference's."""
    wide = accumulation_dtype(hidden.dtype)
    n, depth = hidden.shape
    losses = torch.empty(n, dtype=wide)
    slopes = torch.zeros(n if to_nodes else 0, longest, dtype=wide)
    gradient = torch.empty(n if to_hidden else 0, depth, dtype=wide)
    classes = target.contiguous().numpy()
    ignores, ignored = ignore_index is not None, ignore_index or 0
    order = rows_in_order(classes, rank.numpy(), ignores, ignored)
    starts, edges = paths_in_order(order, classes, path_start.numpy(), path_edge.numpy(), ignores,
                                   ignored)  # fmt: skip
    vectors, biases = weight.detach(), None if bias is None else bias.detach()
    if vectors.dtype != wide:
        # Widened, each vector once: paths then go by places among these.
        node, level, first, since = runs_of_nodes(starts, edges, longest)
        edges = edges_by_place(starts, edges, level, first, since)
        touched = torch.from_numpy(node)
        vectors = vectors[touched].to(wide)
        biases = None if biases is None else biases[touched]
    _loss_rows(
        n, depth * min(longest, 16), as_rows(hidden), as_rows(vectors),
        (losses[:0] if biases is None else biases.to(wide)).numpy(), order, starts, edges,
        losses.numpy(), slopes.numpy(), gradient.numpy(),
    )  # fmt: skip
    if ignores:
        losses.masked_fill_(target == ignored, 0.0)
    return losses, torch.from_numpy(order if to_nodes else order[:0]), slopes, gradient


def to_nodes(
    slopes: Tensor,
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    order: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    n_nodes: int,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    touched, *sums = to_touched_nodes(
        slopes, factor, hidden, target, order, path_start, path_edge, ignore_index, dtype,
        to_weight, to_bias,
    )  # fmt: skip
    weight, bias = (
        torch.zeros(n_nodes if wanted else 0, *values.shape[1:], dtype=dtype)
        for wanted, values in zip((to_weight, to_bias), sums, strict=True)
    )
    for wanted, whole, values in ((to_weight, weight, sums[0]), (to_bias, bias, sums[1])):
        if wanted:
            whole[touched] = values
    return weight, bias


def to_touched_nodes(
    slopes: Tensor,
    factor: Tensor,
    hidden: Tensor,
    target: Tensor,
    order: Tensor,
    path_start: Tensor,
    path_edge: Tensor,
    ignore_index: int | None,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's."""
    depth, ignores, ignored = hidden.shape[1], ignore_index is not None, ignore_index or 0
    starts, edges = paths_in_order(
        order.numpy(), target.contiguous().numpy(), path_start.numpy(), path_edge.numpy(),
        ignores, ignored,
    )  # fmt: skip
    node, level, first, since = runs_of_nodes(starts, edges, slopes.shape[1])
    new, m = (torch.empty, len(node)) if most is None else (torch.zeros, most)
    weight = new(m if to_weight else 0, depth, dtype=slopes.dtype)
    bias = new(m if to_bias else 0, dtype=slopes.dtype)
    _sum_runs(
        int(since[-1]), depth, level, first, since, order.numpy(), slopes.numpy(),
        factor.detach().reshape(-1).contiguous().numpy(), as_rows(hidden), weight.numpy(),
        bias.numpy(),
    )  # fmt: skip
    return pad(torch.from_numpy(node), (0, m - len(node))), weight.to(dtype), bias.to(dtype)


@njit(nogil=True, cache=True)
def _losses(start, stop, hidden, weight, bias, order, starts, edges, losses, slopes, gradient):
    """Of some rows, in their order; one that has no path is NaN."""
    for at in range(start, stop):
        row = order[at]
        state = hidden[row]
        zero, one = losses.dtype.type(0.0), losses.dtype.type(1.0)
        total = zero
        if len(gradient):
            gradient[row, :] = zero
        for entry in range(starts[at], starts[at + 1]):
            node, second = edges[entry] >> 1, edges[entry] & 1
            score = _dot(state, weight[node])
            if len(bias):
                score += bias[node]
            wrong = -score if second else score
            small = math.exp(-abs(wrong))
            total += (wrong if wrong > zero else zero) + math.log1p(small)
            slope = (small if wrong < zero else one) / (one + small)
            slope = -slope if second else slope
            if len(slopes):
                slopes[row, entry - starts[at]] = slope
            if len(gradient):
                _add_scaled(gradient[row], slope, weight[node])
        losses[row] = total if starts[at] < starts[at + 1] else math.nan


@njit(nogil=True, cache=True)
def _sums(start, stop, level, first, since, order, slopes, factor, hidden, weight, bias):
    """The runs that start in a range of all their rows: it is these that threads share evenly."""
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
                _add_scaled(weight[run], value, hidden[row])
        if len(bias):
            bias[run] = one
        run += 1


@njit(nogil=True, fastmath=_FAST)
def _dot(left, right):
    total = left.dtype.type(0.0)
    for i in range(len(left)):
        total += left[i] * right[i]
    return total


@njit(nogil=True, fastmath={"contract"})
def _add_scaled(total, factor, vector):
    for i in range(len(total)):
        total[i] += factor * vector[i]


_loss_rows = by_rows(_losses)
_sum_runs = by_rows(_sums)
