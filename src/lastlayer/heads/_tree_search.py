"""The best leaves of a tree, found without opening all of it; and random ones."""

from collections.abc import Callable

from torch import Tensor

from lastlayer.heads._node_scores import Nodes
from lastlayer.heads._tree_search_eager import eager
from lastlayer.heads._tree_search_levels import Found, beam_by_levels, search_by_levels
from lastlayer.heads._tree_search_walks import draw_leaves
from lastlayer.kernels import search, selected

__all__ = ["Found", "beam_search", "draw_leaves", "exact_search"]

# A row for which more of the weight's rows than this, and than this part of all, would be read
# one by one is sorted as a whole.
_MOST_READ, _MOST_READ_PART = 1024, 1 / 16

Dense = Callable[[Tensor], tuple[Tensor, Tensor]]


@eager
def exact_search(nodes: Nodes, rows: Tensor, k: int, dense: Dense) -> Found:
    """The best k leaves of each row, the lower class first where two are equal.

    A child is at most as probable as its parent, so every node on the way to a leaf is at least
    as probable as the leaf; rounding keeps that, as a log-probability of at most 0 is added.
    Hence whoever opens all nodes that are not below some bound finds all leaves that are not
    below it; and where these are k or more, the best k of them are the best of all.

    On a CPU the most probable node is opened first, until k leaves are more probable than all
    that is closed. No exact search opens fewer: a closed node as probable as the k-th leaf could
    hold a better one. On CUDA, for binary nodes, a first sweep down the tree follows the best
    few nodes of each level and finds k leaves, whose worst is the bound, and a second one opens
    all that is not below it; both in one launch. Wider nodes on CUDA, more than
    ``search.MOST_ON_CUDA`` leaves, float64 there and other devices take the same two sweeps
    with operations of torch for each level.

    Rows in which little is ruled out, as where all classes are alike, rows in which fewer than k
    classes have a probability, and rows where a NaN turns up go to ``dense``. Whether there are
    any is the only thing that the host waits for.

    Args:
        nodes: the tree's; without overlap.
        rows: ``(n, d)``, float32 or float64.
        k: how many.
        dense: values and classes of the best k by sorting all, for some rows.
    """
    tables = nodes.tables
    if _has_kernel(nodes, rows, k):
        most = max(_MOST_READ, int(tables.n_rows * _MOST_READ_PART))
        found = Found(*search.best_leaves(
            "auto", rows, nodes.weight, nodes.bias, tables.child_start, tables.row_start,
            tables.child, len(tables.levels), k, most,
        ))  # fmt: skip
    else:
        found = search_by_levels(nodes, rows, k)
    rest = (found.opened < 0).nonzero().squeeze(-1)
    if len(rest):
        found.values[rest], found.classes[rest] = dense(rest)
        found.opened[rest] = tables.n_inner
    return found


@eager
def beam_search(nodes: Nodes, rows: Tensor, k: int, width: int) -> Found:
    """The best k leaves among those below the ``width`` best nodes of each level.

    Level by level, on a CPU by a kernel. A leaf that is not found has the value -inf and class -1;
    a row that meets a NaN has NaN and -1 throughout.
    """
    tables = nodes.tables
    if selected("tree_search", rows.device.type, rows.dtype) != "cpu":
        return beam_by_levels(nodes, rows, k, width)
    # Imported at first use, as all that needs Numba.
    from lastlayer.kernels.search.cpu import beam_leaves

    # There are no more nodes on a level than in the tree.
    width = min(width, tables.n_inner)
    return Found(*beam_leaves(
        rows, nodes.weight, nodes.bias, tables.child_start, tables.row_start, tables.child, k,
        width,
    ))  # fmt: skip


def _has_kernel(nodes: Nodes, rows: Tensor, k: int) -> bool:
    chosen = selected("tree_search", rows.device.type, rows.dtype)
    if chosen == "triton":
        return not nodes.tables.has_wide and k <= search.MOST_ON_CUDA
    return chosen == "cpu"
