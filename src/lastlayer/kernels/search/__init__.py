"""Exact top-k search that reads few vectors: leaves of a tree, and blocks of classes.

In a tree, a *row* of ``weight`` is the vector of a binary node, whose score is the logit of its
second child, or the vector of one child of a wider node. Nodes are numbered level by level; the
root is node 0. ``random_leaves`` and ``leaf_log_probs`` are walks down the tree. ``beam_leaves`` is
only in ``cpu.py``, and blocks of classes, ``peaks_and_levels_`` and ``largest``, only in
``triton.py``.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation

# Largest k of the CUDA kernel, which supports binary trees only.
MOST_ON_CUDA = 64
# Position of a random walk after a NaN. Other positions are nodes, or ~c at the leaf of class c.
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
