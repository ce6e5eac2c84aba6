"""The loss along paths of a binary tree in plain torch: defines the truth."""

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
    """Minus the log-probability of each target, and what the gradients need.

    Args:
        hidden: ``(n, d)``.
        weight: one vector per node, ``(n_nodes, d)``.
        bias: one number per node, ``(n_nodes,)``, or None.
        target: class ids, ``(n,)``.
        rank: the place of each class among the leaves from left to right, ``(n_classes,)``.
        path_start: ``(n_classes + 1,)``, int64.
        path_edge: the paths of all classes, int32.
        ignore_index: the target of rows that do not count, or None.
        longest: the most nodes that a path has.
        to_nodes: whether a gradient of weight or bias will be asked for.
        to_hidden: whether that of hidden is.
        mean: whether all three below are divided by the number of rows that are not ignored.

    Returns:
        In float32, or float64 from a float64 hidden:

        * losses ``(n,)``;
        * the rows in the order of the ranks of their targets, those without a path last,
          ``(n,)``: the rows whose path has a node are then neighbours;
        * slopes ``(n, longest)``: σ(w·h + b) - y at each node of a row's path, y = 1 where the
          second child is taken, and 0 beyond its end;
        * ``sum_v slope_v weight_v`` of each row, ``(n, d)``.

        The last three are empty where they are not asked for.
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

    Row v of the first is ``sum factor_i slope_iv hidden_i`` over the rows i whose path has v, of
    the second ``sum factor_i slope_iv``; sums are in the dtype of slopes. They are empty without
    ``to_weight`` and ``to_bias``. ``factor`` is the upstream gradient of each row's loss, ``(n,)``,
    or of all together, ``()``; ``slopes`` and the order are as :func:`loss` made them, and the rest
    is as it was given there.
    """
    _, known = _kinds(target, path_start, ignore_index)
    node, _, inside = _paths(target, known, path_start, path_edge, slopes.shape[1])
    slopes = torch.where(inside, slopes * factor.reshape(-1, 1), 0.0)
    states = torch.where(known.unsqueeze(-1), hidden.to(slopes.dtype), 0.0)
    weight, bias = _sums(slopes, states, node, inside, n_nodes, to_weight, to_bias)
    return weight.to(dtype), bias.to(dtype)


def to_touched_nodes(
    slopes: Tensor, factor: Tensor, hidden: Tensor, target: Tensor, _order: Tensor,
    path_start: Tensor, path_edge: Tensor, ignore_index: int | None, dtype: torch.dtype,
    to_weight: bool, to_bias: bool, most: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The nodes on the paths, ascending, ``(1, m)``, and their rows of what :func:`to_nodes` gives.

    Args are those of :func:`to_nodes`, less ``n_nodes``, and ``most``: where it is given, there is
    room for so many nodes, and what is left of it is zeros of node 0. Else m is their number,
    which the host has to know.
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
    return pad(touched, (0, left)).unsqueeze(0), weight.to(dtype), bias.to(dtype)


def _sums(
    slopes: Tensor, states: Tensor, node: Tensor, inside: Tensor, n_nodes: int, to_weight: bool,
    to_bias: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    weight = slopes.new_zeros(n_nodes if to_weight else 0, states.shape[1])
    bias = slopes.new_zeros(n_nodes if to_bias else 0)
    if not n_nodes:
        return weight, bias
    # Level by level: the product of all is never held. Padding adds 0 to the first node, also where
    # a state is infinite.
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
    """Nodes ``(n, longest)``, whether their second child is taken, and which there are.

    Padding is node 0.
    """
    classes = torch.where(known, target, 0)
    first = path_start[classes].unsqueeze(-1)
    place = first + torch.arange(longest, device=target.device)
    inside = (place < path_start[classes + 1].unsqueeze(-1)) & known.unsqueeze(-1)
    edge = path_edge[torch.where(inside, place, 0)].long()
    return torch.where(inside, edge >> 1, 0), (edge & 1) == 1, inside
