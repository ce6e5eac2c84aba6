"""Random leaves of a tree, by walks down from its root."""

import torch
from torch import Tensor

from lastlayer.heads._node_scores import Nodes, child_log_prob
from lastlayer.heads._sampling import draw_classes
from lastlayer.heads._tree_search_eager import eager
from lastlayer.kernels import selected
from lastlayer.kernels.search import NOWHERE

# Numbers held at a time where walks choose a child.
_NUMBERS = 2_000_000


@eager
def draw_leaves(
    nodes: Nodes, rows: Tensor, n_samples: int, generator: torch.Generator | None
) -> Tensor:
    """Class ids ``(n, n_samples)``: a walk down from the root for each; -1 in a row of NaN.

    All walks take a step at a time, on the CPU by a kernel.
    """
    on_cpu = selected("tree_search", rows.device.type, rows.dtype) == "cpu"
    step_down = _step_down_on_cpu if on_cpu else _step_down
    # The node of each walk, and ~c where it has ended at class c.
    at = torch.zeros(rows.shape[0], n_samples, dtype=torch.int64, device=rows.device)
    for _ in range(len(nodes.tables.levels)):
        # Chance for all, so that a walk does not depend on when the others end.
        chance = torch.rand(at.shape, dtype=torch.float64, device=rows.device, generator=generator)
        step_down(nodes, rows, at, chance)
        if not bool((at >= 0).any()):
            break
    return torch.where(at == NOWHERE, -1, ~at)


def _step_down_on_cpu(nodes: Nodes, rows: Tensor, at: Tensor, chance: Tensor) -> None:
    # Imported at first use, as all that needs Numba.
    from lastlayer.kernels.search.cpu import step_down_

    tables = nodes.tables
    step_down_(
        rows, nodes.weight, nodes.bias, tables.child_start, tables.row_start, tables.child, chance,
        at,
    )  # fmt: skip


def _step_down(nodes: Nodes, rows: Tensor, at: Tensor, chance: Tensor) -> None:
    walk = (at >= 0).nonzero(as_tuple=True)
    node = at[walk]
    drawn = _drawn_children(nodes, rows, walk[0], node, chance[walk])
    edge = nodes.tables.child_start[node] + drawn.clamp(min=0)
    at[walk] = torch.where(drawn < 0, NOWHERE, nodes.tables.child[edge].long())


def _drawn_children(
    nodes: Nodes, rows: Tensor, of_row: Tensor, node: Tensor, chance: Tensor
) -> Tensor:
    """A child of each entry's node; walks of a row that are at the same node share its scores."""
    n_inner = nodes.tables.n_inner
    pairs, place = torch.unique(of_row * n_inner + node, return_inverse=True)
    log_probs = child_log_prob(nodes, rows, pairs // n_inner, pairs % n_inner)
    step = max(1, _NUMBERS // max(1, log_probs.shape[1]))
    drawn = [
        draw_classes(log_probs[at], each.unsqueeze(-1)).squeeze(-1)
        for at, each in zip(place.split(step), chance.split(step), strict=True)
    ]
    return torch.cat(drawn)
