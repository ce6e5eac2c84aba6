"""A step of random walks down a tree, on the CPU; elsewhere there is no kernel for it."""

import math

import numpy as np
from numba import njit
from torch import Tensor

from lastlayer.kernels._threads import by_rows
from lastlayer.kernels.tree_search import NOWHERE
from lastlayer.kernels.tree_search._nodes import as_arrays, open_node


def step_down_(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    child_start: Tensor,
    row_start: Tensor,
    child: Tensor,
    chance: Tensor,
    at: Tensor,
) -> None:
    """Moves each walk from its node to a child: the first whose cumulated probability exceeds.

    Args:
        hidden: ``(n, d)``, float32 or float64, and so on as for the search.
        weight: ``(n_rows, d)``.
        bias: ``(n_rows,)``, or None.
        child_start: ``(n_inner + 1,)``.
        row_start: ``(n_inner + 1,)``.
        child: ``(n_edges,)``.
        chance: numbers in [0, 1), ``(n, m)``, float64.
        at: where each walk is, ``(n, m)``, int64, contiguous: a node, ~c at the end, or NOWHERE.
    """
    if at.numel():
        arrays = as_arrays(hidden, weight, bias, child_start, row_start, child, chance)
        _step_rows(at.shape[0], at.shape[1] * hidden.shape[1], *arrays, at.numpy())


@njit(nogil=True, cache=True)
def _step(
    start, stop, hidden, weight, bits, kind, bias, child_start, row_start, child, chance, at
):  # fmt: skip
    below = np.empty(2, hidden.dtype)
    widened = np.empty(hidden.shape[1], np.float32)
    for row in range(start, stop):
        known, whole = -1, True
        for i in range(at.shape[1]):
            node = at[row, i]
            if node < 0:
                continue
            arity = child_start[node + 1] - child_start[node]
            # Walks of a row start together.
            if node != known:
                if arity > len(below):
                    below = np.empty(arity, hidden.dtype)
                n_rows = row_start[node + 1] - row_start[node]
                whole = open_node(
                    hidden[row], weight, bits, kind, bias, row_start[node], n_rows, arity, widened,
                    below,
                )  # fmt: skip
                known = node
            if whole:
                at[row, i] = child[child_start[node] + _drawn(below, arity, chance[row, i])]
            else:
                at[row, i] = NOWHERE


@njit(nogil=True)
def _drawn(log_probs, arity, chance):
    """Sums are in float64, so that many small children keep their shares."""
    total = 0.0
    for i in range(arity):
        total += math.exp(np.float64(log_probs[i]))
    limit = chance * total
    reached, last = 0.0, 0
    for i in range(arity):
        share = math.exp(np.float64(log_probs[i]))
        reached += share
        if reached > limit:
            return i
        if share > 0.0:
            last = i
    # The product was rounded up to the total.
    return last


_step_rows = by_rows(_step)
