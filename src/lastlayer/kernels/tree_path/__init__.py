"""The loss of classes that are paths through a binary tree, and its gradients.

Class c has the path ``path_edge[path_start[c]:path_start[c + 1]]`` from the root down: at node
``edge >> 1`` the child ``edge & 1`` is taken, the second one with probability σ(w·h + b). A row
whose target is ``ignore_index`` has loss 0; one whose target is no class has loss NaN; neither
has a gradient.
"""

import torch
from torch import Tensor

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._registry import Operation

_PATHS = "Tensor path_start, Tensor path_edge, int? ignore_index"
_SUMMED = f"Tensor slopes, Tensor factor, Tensor hidden, Tensor target, Tensor order, {_PATHS}"
_WANTED = "ScalarType dtype, bool to_weight, bool to_bias"


def _fake_loss(
    hidden: Tensor,
    _weight: Tensor,
    _bias: Tensor | None,
    target: Tensor,
    _rank: Tensor,
    _path_start: Tensor,
    _path_edge: Tensor,
    _ignore_index: int | None,
    longest: int,
    to_nodes: bool,
    to_hidden: bool,
) -> tuple[Tensor, ...]:
    wide = accumulation_dtype(hidden.dtype)
    n, depth = hidden.shape
    return (
        hidden.new_empty(n, dtype=wide),
        target.new_empty(n if to_nodes else 0),
        hidden.new_empty(n if to_nodes else 0, longest, dtype=wide),
        hidden.new_empty(n if to_hidden else 0, depth, dtype=wide),
    )


def _fake_dense(
    slopes: Tensor,
    _factor: Tensor,
    hidden: Tensor,
    _target: Tensor,
    _order: Tensor,
    _path_start: Tensor,
    _path_edge: Tensor,
    _ignore_index: int | None,
    n_nodes: int,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:
    return (
        slopes.new_empty(n_nodes if to_weight else 0, hidden.shape[1], dtype=dtype),
        slopes.new_empty(n_nodes if to_bias else 0, dtype=dtype),
    )


def _fake_sparse(
    slopes: Tensor,
    _factor: Tensor,
    hidden: Tensor,
    _target: Tensor,
    _order: Tensor,
    _path_start: Tensor,
    _path_edge: Tensor,
    _ignore_index: int | None,
    dtype: torch.dtype,
    to_weight: bool,
    to_bias: bool,
    most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    touched = torch.library.get_ctx().new_dynamic_size() if most is None else most
    return (
        slopes.new_empty(touched, dtype=torch.int64),
        slopes.new_empty(touched if to_weight else 0, hidden.shape[1], dtype=dtype),
        slopes.new_empty(touched if to_bias else 0, dtype=dtype),
    )


loss = Operation(
    "tree_path_loss",
    f"(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor rank, {_PATHS}, "
    "int longest, bool to_nodes, bool to_hidden) -> (Tensor, Tensor, Tensor, Tensor)",
    __name__,
    "loss",
    _fake_loss,
)
to_nodes = Operation(
    "tree_path_to_nodes",
    f"({_SUMMED}, int n_nodes, {_WANTED}) -> (Tensor, Tensor)",
    __name__,
    "to_nodes",
    _fake_dense,
)
to_touched_nodes = Operation(
    "tree_path_to_touched_nodes",
    f"({_SUMMED}, {_WANTED}, int? most=None) -> (Tensor, Tensor, Tensor)",
    __name__,
    "to_touched_nodes",
    _fake_sparse,
)
