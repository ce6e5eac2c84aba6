"""The operations under the maps, each with a reference, a Triton and a CPU implementation."""

from lastlayer.kernels import (
    class_scores,
    entmax,
    entmax_rows,
    row_updates,
    sampled_rows,
    scale,
    softmax_gradient,
    softmax_rows,
    sparse_gradient,
    topk_softmax,
    touched_rows,
    tree_path,
    tree_search,
)
from lastlayer.kernels._registry import IMPLEMENTATIONS, Impl, available, selected

__all__ = [
    "IMPLEMENTATIONS",
    "Impl",
    "available",
    "class_scores",
    "entmax",
    "entmax_rows",
    "row_updates",
    "sampled_rows",
    "scale",
    "selected",
    "softmax_gradient",
    "softmax_rows",
    "sparse_gradient",
    "topk_softmax",
    "touched_rows",
    "tree_path",
    "tree_search",
]
