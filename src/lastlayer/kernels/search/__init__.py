"""The k best classes without a look at most of them: leaves of a tree, and blocks of classes.

Of a tree, a *row* of ``weight`` is the vector of a binary node, whose score decides for its second
child, or that of one child of a wider node. Nodes are numbered level by level, the root is node 0.
Random leaves, and log-probabilities of chosen ones, are walks down the tree. ``cpu.py`` has
``beam_leaves`` besides, and ``triton.py`` the blocks of classes, ``peaks_and_levels_`` and
``largest``; there are no others for these.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# On CUDA the kernel is for trees of binary nodes and for no more leaves than this.
MOST_ON_CUDA = 64
# Where a random walk is that met a NaN; else it is at a node, or at the end, ~c for class c.
NOWHERE = -(1 << 62)


def _fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    n, k = hidden.shape[0], rest[-2]
    classes = hidden.new_empty(n, k, dtype=torch.int64)
    return hidden.new_empty(n, k), classes, hidden.new_empty(n, dtype=torch.int64)


def _fake_draws(*given: Any) -> Tensor:
    return torch.empty_like(given[-1], dtype=torch.int64)


def _fake_log_probs(hidden: Tensor, *rest: Any) -> Tensor:
    return hidden.new_empty(rest[-1].shape, dtype=accumulation_dtype(hidden.dtype))


best_leaves = operation("search.best_leaves", "tree_search", _fake)
random_leaves = operation("search.random_leaves", "tree_draw", _fake_draws)
leaf_log_probs = operation("search.leaf_log_probs", "tree_log_probs", _fake_log_probs)
