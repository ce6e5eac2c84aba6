"""The operations below the maps, losses and heads: references, and what is fast on each device."""

from lastlayer.kernels import (
    entmax,
    entmax_rows,
    info_nce,
    linear_softmax,
    node_groups,
    prediction,
    products,
    rng,
    sampled_rows,
    search,
    softmax_rows,
    span_sums,
    topk_softmax,
    touched_rows,
    tree_path,
    zlpr,
)
from lastlayer.kernels._cpu import empty
from lastlayer.kernels._registry import IMPLEMENTATIONS, Impl, available, operations, selected

__all__ = [
    "IMPLEMENTATIONS",
    "Impl",
    "available",
    "empty",
    "entmax",
    "entmax_rows",
    "info_nce",
    "linear_softmax",
    "node_groups",
    "operations",
    "prediction",
    "products",
    "rng",
    "sampled_rows",
    "search",
    "selected",
    "softmax_rows",
    "span_sums",
    "topk_softmax",
    "touched_rows",
    "tree_path",
    "zlpr",
]
