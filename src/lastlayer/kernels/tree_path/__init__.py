"""The loss of classes that are paths through a binary tree, and its gradients.

Class c has the path ``path_edge[path_start[c]:path_start[c + 1]]`` from the root down: at node
``edge >> 1`` it takes the child ``edge & 1``; the second child has probability σ(w·h + b). A row
whose target is ``ignore_index`` has loss 0; one whose target is not a class has loss NaN; both
have gradient 0.
"""

from typing import Any

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import operation


def _loss(
    hidden: Tensor, _weight: Tensor, _bias: Tensor | None, target: Tensor, _rank: Tensor,
    _path_start: Tensor, _path_edge: Tensor, _ignore_index: int | None, longest: int,
    to_nodes: bool, to_hidden: bool, _mean: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    wide = accumulation_dtype(hidden.dtype)
    n, depth = hidden.shape
    return (
        hidden.new_empty(n, dtype=wide),
        target.new_empty(n if to_nodes else 0),
        hidden.new_empty(n if to_nodes else 0, longest, dtype=wide),
        hidden.new_empty(n if to_hidden else 0, depth, dtype=wide),
    )


def _to_nodes(
    slopes: Tensor, _factor: Tensor, hidden: Tensor, _target: Tensor, _order: Tensor,
    _path_start: Tensor, _path_edge: Tensor, _ignore_index: int | None, n_nodes: int,
    dtype: torch.dtype, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = slopes.new_empty(n_nodes if to_weight else 0, hidden.shape[1], dtype=dtype)
    return weight, slopes.new_empty(n_nodes if to_bias else 0, dtype=dtype)


def _to_touched_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, order: Tensor,
    path_start: Tensor, path_edge: Tensor, _level_start: Tensor, ignore_index: int | None,
    dtype: torch.dtype, to_weight: bool, to_bias: bool, most: int | None = None,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    # The size is `most`, or the number of nodes that the kernel finds.
    m: Any = torch.library.get_ctx().new_dynamic_size() if most is None else most
    touched = slopes.new_empty(1, m, dtype=torch.int64)
    weight, bias = _to_nodes(
        slopes, factor, hidden, target, order, path_start, path_edge, ignore_index, m, dtype,
        to_weight, to_bias,
    )  # fmt: skip
    n, depth = hidden.shape
    return touched, weight, bias, hidden.new_empty(0 if gradient is None else n, depth)


loss = operation("tree_path.loss", "tree_path_loss", _loss)
to_nodes = operation("tree_path.to_nodes", "tree_path_to_nodes", _to_nodes)
to_touched_nodes = operation(
    "tree_path.to_touched_nodes", "tree_path_to_touched_nodes", _to_touched_nodes
)
