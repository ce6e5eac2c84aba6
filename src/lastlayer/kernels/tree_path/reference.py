"""The loss along paths of a binary tree in plain torch: the reference."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from lastlayer._torch import accumulation_dtype
from lastlayer.kernels._cpu import parts


def loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, rank: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, longest: int, to_nodes: bool,
    to_hidden: bool, mean: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The negative log-probability of each target, and what backward needs.

    Args:
        hidden: ``(n, d)``.
        weight: one vector per node, ``(n_nodes, d)``.
        bias: one number per node, ``(n_nodes,)``, or None.
        target: class ids, ``(n,)``.
        rank: position of each class among the leaves from left to right, ``(n_classes,)``.
        path_start: ``(n_classes + 1,)``, int64.
        path_edge: the paths of all classes, int32.
        ignore_index: target of rows to ignore, or None.
        longest: number of nodes of the longest path.
        to_nodes: whether the gradient of weight or bias is needed.
        to_hidden: whether the gradient of hidden is needed.
        mean: whether losses, slopes and gradient are divided by the number of rows that are not
            ignored.

    Returns:
        In float32, or float64 for a float64 hidden:

        * losses ``(n,)``;
        * the rows sorted by the rank of their targets, those without a path last, ``(n,)``: rows
          that share a node are then adjacent;
        * slopes ``(n, longest)``: σ(w·h + b) - y at each node of a row's path, where y = 1 if it
          takes the second child; 0 beyond the end of the path;
        * the gradient of hidden, ``sum_v slope_v weight_v`` of each row, ``(n, d)``.

        The last three are empty if not needed.
    """
    dtype = accumulation_dtype(hidden.dtype)
    n, depth = hidden.shape
    ignored, known = _kinds(target, path_start, ignore_index)
    losses = hidden.new_zeros(n, dtype=dtype)
    slopes = hidden.new_zeros(n if to_nodes else 0, longest, dtype=dtype)
    gradient = hidden.new_zeros(n if to_hidden else 0, depth, dtype=dtype)
    for part in parts((n, longest * depth)):
        node, second, inside = _paths(target[part], known[part], path_start, path_edge, longest)
        states = torch.where(known[part].unsqueeze(-1), hidden[part].to(dtype), 0.0)
        vectors = weight[node].to(dtype)
        scores = torch.einsum("nkd,nd->nk", vectors, states)
        if bias is not None:
            scores = scores + bias[node].to(dtype)
        wrong = torch.where(second, -scores, scores)
        losses[part] = torch.where(inside, -logsigmoid(-wrong), 0.0).sum(-1)
        slope = torch.where(second, -torch.sigmoid(wrong), torch.sigmoid(wrong))
        slope = torch.where(inside, slope, 0.0)
        if to_nodes:
            slopes[part] = slope
        if to_hidden:
            vectors = torch.where(inside.unsqueeze(-1), vectors, 0.0)
            gradient[part] = torch.einsum("nk,nkd->nd", slope, vectors)
    if mean:
        share = 1.0 / (~ignored).sum().clamp(min=1).to(dtype)
        for each in (losses, slopes, gradient):
            each.mul_(share)
    losses.masked_fill_(~known & ~ignored, torch.nan)
    key = torch.where(known, rank[torch.where(known, target, 0)], len(rank))
    order = key.argsort(stable=True) if to_nodes else target.new_empty(0)
    return losses, order, slopes, gradient


def to_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, _order: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, n_nodes: int,
    dtype: torch.dtype, to_weight: bool, to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of weight ``(n_nodes, d)`` and bias ``(n_nodes,)`` in ``dtype``.

    Row v of the first is ``sum factor_i slope_iv hidden_i`` over the rows i whose path has v; of
    the second ``sum factor_i slope_iv``. Sums are in the dtype of slopes. They are empty without
    ``to_weight`` or ``to_bias``. ``factor`` is the upstream gradient of each row's loss, ``(n,)``,
    or one for all, ``()``. ``slopes`` and the order are results of :func:`loss`; the other
    arguments are the same as there.
    """
    _, known = _kinds(target, path_start, ignore_index)
    node, _, inside = _paths(target, known, path_start, path_edge, slopes.shape[1])
    slopes = torch.where(inside, slopes * factor.reshape(-1, 1), 0.0)
    states = torch.where(known.unsqueeze(-1), hidden.to(slopes.dtype), 0.0)
    weight, bias = _sums(slopes, states, node, inside, n_nodes, to_weight, to_bias)
    return weight.to(dtype), bias.to(dtype)


def to_touched_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, _order: Tensor,
    path_start: Tensor, path_edge: Tensor, _level_start: Tensor, ignore_index: int | None,
    dtype: torch.dtype, to_weight: bool, to_bias: bool, most: int | None = None,
    gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The nodes on the paths, ascending, ``(1, m)``, and their rows of :func:`to_nodes`.

    Arguments are those of :func:`to_nodes` without ``n_nodes``, and:

    * level_start: the first edge of each level, ``(levels + 1,)``: twice its first node;
    * most: m, at least the sum of ``min(n, nodes)`` over the levels; anywhere among the nodes found
      there is padding, zeros for node 0. If it is None, m is the number of nodes found, which needs
      a host sync; Triton does not implement it;
    * gradient: the gradient of hidden from :func:`loss`, or None. The fourth result is this times
      ``factor``, in the dtype of hidden, or empty.
    """
    _, known = _kinds(target, path_start, ignore_index)
    node, _, inside = _paths(target, known, path_start, path_edge, slopes.shape[1])
    slopes = torch.where(inside, slopes * factor.reshape(-1, 1), 0.0)
    states = torch.where(known.unsqueeze(-1), hidden.to(slopes.dtype), 0.0)
    touched, place = node[inside].unique(return_inverse=True)
    places = torch.zeros_like(node).masked_scatter_(inside, place)
    weight, bias = _sums(slopes, states, places, inside, len(touched), to_weight, to_bias)
    left = 0 if most is None else most - len(touched)
    weight = pad(weight, (0, 0, 0, left if to_weight else 0))
    bias = pad(bias, (0, left if to_bias else 0))
    touched = pad(touched, (0, left)).unsqueeze(0)
    scaled = hidden.new_empty(0, hidden.shape[1])
    if gradient is not None:
        scaled = (gradient * factor.reshape(-1, 1)).to(hidden.dtype)
    return touched, weight.to(dtype), bias.to(dtype), scaled


def _sums(
    slopes: Tensor, states: Tensor, node: Tensor, inside: Tensor, n_nodes: int, to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = slopes.new_zeros(n_nodes if to_weight else 0, states.shape[1])
    bias = slopes.new_zeros(n_nodes if to_bias else 0)
    if not n_nodes:
        return weight, bias
    # Level by level, so that the product for all levels is never stored. Padding adds 0 to the
    # first node, even if a state is infinite.
    for level in range(slopes.shape[1]):
        if to_weight:
            moved = torch.where(inside[:, level, None], slopes[:, level, None] * states, 0.0)
            weight.index_add_(0, node[:, level], moved)
        if to_bias:
            bias.index_add_(0, node[:, level], slopes[:, level])
    return weight, bias


def _kinds(target: Tensor, path_start: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor]:
    """Which rows are ignored, and which have a class."""
    ignored = torch.zeros_like(target, dtype=torch.bool)
    if ignore_index is not None:
        ignored = target == ignore_index
    return ignored, (target >= 0) & (target < len(path_start) - 1) & ~ignored


def _paths(
    target: Tensor, known: Tensor, path_start: Tensor, path_edge: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes ``(n, longest)``, whether their second child is taken, and which are on the path.

    Padding is node 0.
    """
    classes = torch.where(known, target, 0)
    first = path_start[classes].unsqueeze(-1)
    place = first + torch.arange(longest, device=target.device)
    inside = (place < path_start[classes + 1].unsqueeze(-1)) & known.unsqueeze(-1)
    edge = path_edge[torch.where(inside, place, 0)].long()
    return torch.where(inside, edge >> 1, 0), (edge & 1) == 1, inside
