"""The best leaves of a tree on the CPU: best-first, by a heap for each row.

README.md beside this file has the proof that it opens as few nodes as can be.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.tree_search._heap import pop, push
from lastlayer.kernels.tree_search._nodes import as_arrays, open_node

# Nodes opened for each leaf, to judge how many threads are worth while.
_OPENED_FOR_EACH = 16


def best_leaves(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    child_start: Tensor,
    row_start: Tensor,
    child: Tensor,
    levels: int,  # noqa: ARG001 — a heap knows no levels
    k: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference's, but a row that reads too much, or meets a NaN, is given up.

    So is one with fewer than k classes that have a probability.
    """
    n, depth = hidden.shape
    values = torch.full((n, k), torch.nan, dtype=hidden.dtype)
    classes = torch.full((n, k), -1)
    opened = torch.full((n,), -1)
    # An opened node adds one at most to what can be chosen: k leaves take k - 1 of them.
    if n and k <= most + 1:
        arrays = as_arrays(hidden, weight, bias, child_start, row_start, child)
        results = values.numpy(), classes.numpy(), opened.numpy()
        _search_rows(n, k * _OPENED_FOR_EACH * depth, *arrays, most, *results)
    return values, classes, opened


@njit(nogil=True, cache=True)
def _search(
    start, stop, hidden, weight, bits, kind, bias, child_start, row_start, child, most, values,
    classes, opened,
):  # fmt: skip
    """Opens the most probable node until k leaves are more probable than all that is closed.

    The heap holds children of opened nodes, leaves among them, and gives the most probable first.
    A leaf on top is the next best of all: nothing below the others is more probable than they.
    """
    k = values.shape[1]
    # An opened node takes one away and adds, for each row that is read, one; or two for one row.
    heap = np.empty(most + 2, hidden.dtype), np.empty(most + 2, np.int32)
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        size = push(heap, 0, hidden.dtype.type(0.0), np.int32(0))
        found, n_opened, read = 0, 0, 0
        while size > 0 and found < k:
            reached, at = heap[0][0], heap[1][0]
            size = pop(heap, size)
            if at < 0:
                values[row, found], classes[row, found] = reached, ~at
                found += 1
                continue
            n_rows, arity = row_start[at + 1] - row_start[at], child_start[at + 1] - child_start[at]
            read += n_rows
            if read > most:
                break
            if arity > len(below):
                below = np.empty(arity, hidden.dtype)
            n_opened += 1
            if not open_node(
                hidden[row], weight, bits, kind, bias, row_start[at], n_rows, arity, widened, below
            ):
                break
            for i in range(arity):
                if below[i] > -np.inf:
                    size = push(heap, size, reached + below[i], child[child_start[at] + i])
        if found == k:
            opened[row] = n_opened
        else:
            values[row, :], classes[row, :] = np.nan, -1


_search_rows = by_rows(_search)
