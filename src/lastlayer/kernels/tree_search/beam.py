"""The best leaves below the best nodes of each level, on the CPU; there is no other kernel."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.tree_search._heap import pop, push
from lastlayer.kernels.tree_search._nodes import as_arrays, open_node


def beam_leaves(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    child_start: Tensor,
    row_start: Tensor,
    child: Tensor,
    k: int,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and classes ``(n, k)``, and how many nodes were opened ``(n,)``.

    What is not found has the value -inf and class -1; a row that meets a NaN has NaN throughout.
    Arguments are those of the exact search, and ``width``, the most nodes of a level, at least k.
    """
    n, depth = hidden.shape
    values = torch.full((n, k), -torch.inf, dtype=hidden.dtype)
    classes = torch.full((n, k), -1)
    opened = torch.zeros(n, dtype=torch.int64)
    if n:
        arrays = as_arrays(hidden, weight, bias, child_start, row_start, child)
        results = values.numpy(), classes.numpy(), opened.numpy()
        _beam_rows(n, width * depth, *arrays, width, *results)
    return values, classes, opened


@njit(nogil=True, cache=True)
def _beam(
    start, stop, hidden, weight, bits, kind, bias, child_start, row_start, child, width, values,
    classes, opened,
):  # fmt: skip
    # Nodes of this level, and a heap of those of the next.
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
                if arity > len(below):
                    below = np.empty(arity, hidden.dtype)
                    heap = _grown(heap[0], width * arity), _grown(heap[1], width * arity)
                whole &= open_node(
                    hidden[row], weight, bits, kind, bias, row_start[at],
                    row_start[at + 1] - row_start[at], arity, widened, below,
                )  # fmt: skip
                for j in range(arity):
                    log_prob, to = log_probs[i] + below[j], child[child_start[at] + j]
                    if log_prob > -np.inf and to < 0:
                        _keep(values[row], classes[row], log_prob, ~to)
                    elif log_prob > -np.inf:
                        size = push(heap, size, log_prob, to)
            opened[row] += n_nodes
            n_nodes = 0
            while size > 0 and n_nodes < width and heap[0][0] >= values[row, -1]:
                log_probs[n_nodes], nodes[n_nodes] = heap[0][0], heap[1][0]
                n_nodes += 1
                size = pop(heap, size)
        if not whole:
            values[row, :], classes[row, :] = np.nan, -1


@njit(nogil=True)
def _grown(array, size):
    grown = np.empty(size, array.dtype)
    grown[: len(array)] = array
    return grown


@njit(nogil=True)
def _keep(values, classes, value, found):
    """Puts a leaf in its place among the best, of equal ones in the order of classes."""
    i = len(values) - 1
    if value < values[i] or (value == values[i] and found > classes[i]):
        return
    while i > 0 and (values[i - 1] < value or (values[i - 1] == value and classes[i - 1] > found)):
        values[i], classes[i] = values[i - 1], classes[i - 1]
        i -= 1
    values[i], classes[i] = value, found


_beam_rows = by_rows(_beam)
