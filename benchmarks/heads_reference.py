"""Losses of heads in float64, as plain formulas that autograd differentiates.

Each function computes the loss of each row from a float64 copy of the head, hidden states and
targets.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy, logsigmoid

from benchmarks import driver
from benchmarks.driver import Results
from lastlayer.trees import Tree

Losses = Callable[[Any, Tensor, Tensor], Tensor]


def in_float64(module: torch.nn.Module) -> Any:
    """A float64 copy; parameters are converted directly, without a copy in their own dtype."""
    wide = {id(each): Parameter(each.detach().double()) for each in module.parameters()}
    return copy.deepcopy(module, wide).double()


def step(
    module: torch.nn.Module, losses: Losses, classes: int, hidden: Tensor, target: Tensor
) -> Results:
    """The mean loss, and the gradients of hidden states and parameters, in chunks of rows."""
    twin = in_float64(module)
    (wide,) = driver.in_float64(hidden)
    return driver.exact_step(
        {"hidden": wide, **dict(twin.named_parameters())},
        lambda part: losses(twin, wide[part], target[part]),
        len(hidden),
        classes,
    )


def by_log_prob(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """Minus ``log_prob``, for torch's modules and for heads without a formula here."""
    losses: Tensor = -twin.log_prob(hidden).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return losses


def flat(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """One softmax over all classes."""
    return cross_entropy(hidden @ twin.weight.t() + twin.bias, target, reduction="none")


def paths(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """The sum of the losses of the choices on the path to a class in a tree."""
    return _path_losses(twin.tree, twin.weight, twin.bias, hidden, target)


def gathered(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """The same for :class:`benchmarks.heads.GatheredPaths`."""
    biases = twin.bias.weight.squeeze(-1)
    return _path_losses(twin.tree, twin.weight.weight, biases, hidden, target)


def _path_losses(
    tree: Tree, weight: Tensor, bias: Tensor, hidden: Tensor, target: Tensor
) -> Tensor:
    classes = target.cpu().numpy()
    first, lengths = tree.path_start[classes], tree.class_depth[classes].astype(np.int64)
    row = np.repeat(np.arange(len(classes)), lengths)
    ends = np.cumsum(lengths)
    entry = np.arange(ends[-1]) - np.repeat(ends - lengths - first, lengths)
    node, position = tree.path_node[entry], tree.path_position[entry]
    # One vector for a binary node, one for each child of a wider one.
    vectors = np.where(tree.arity == 2, 1, tree.arity)
    start = np.cumsum(vectors) - vectors
    losses = hidden.new_zeros(len(classes))
    at = np.flatnonzero(tree.arity[node] == 2)
    if len(at):
        rows, owned, second = _on(hidden, row[at], start[node[at]], position[at])
        scores = (hidden[rows] * weight[owned]).sum(-1) + bias[owned]
        binary = -logsigmoid(torch.where(second == 1, scores, -scores))
        losses = losses.index_add(0, rows, binary)
    at = np.flatnonzero(tree.arity[node] > 2)
    if len(at):
        at = at[np.argsort(node[at], kind="stable")]
        nodes, counts = np.unique(node[at], return_counts=True)
        own = np.concatenate([start[v] + np.arange(tree.arity[v]) for v in nodes])
        rows, places, owned = _on(hidden, row[at], position[at], own)
        # One gather for all nodes: each gather has a gradient of the size of the whole table.
        some = hidden[rows].split(counts.tolist())
        sizes = tree.arity[nodes].tolist()
        parts = zip(some, weight[owned].split(sizes), bias[owned].split(sizes), strict=True)
        log_prob = [torch.log_softmax(h @ w.t() + b, -1) for h, w, b in parts]
        chosen = zip(log_prob, places.split(counts.tolist()), strict=True)
        wide = torch.cat([lp.gather(-1, p.unsqueeze(-1)).squeeze(-1) for lp, p in chosen])
        losses = losses.index_add(0, rows, -wide)
    return losses


def _on(like: Tensor, *arrays: Any) -> list[Tensor]:
    return [torch.from_numpy(np.asarray(a, np.int64)).to(like.device) for a in arrays]


def sampled(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """A softmax over the target and the draws of the last step, corrected by log-probability."""
    ids, log_prob, scores, at_target = _drawn_scores(twin, hidden, target)
    kept = ids != target.unsqueeze(-1)
    left = twin.sampler.log_complement(target, dtype=torch.float64) - kept.sum(-1).double().log()
    logits = torch.where(kept, scores - log_prob + left.unsqueeze(-1), -torch.inf)
    return torch.logaddexp(torch.logsumexp(logits, -1), at_target) - at_target


def noise(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """Binary losses of the target and of the noise that the last step drew."""
    ids, log_prob, scores, at_target = _drawn_scores(twin, hidden, target)
    log_k = math.log(len(ids))
    of_target = at_target - log_k - twin.sampler.log_prob(target, dtype=torch.float64)
    return -logsigmoid(of_target) - logsigmoid(-(scores - log_k - log_prob)).sum(-1)


def negatives(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """The same for the scores themselves, without a correction by log-probability."""
    _, _, scores, at_target = _drawn_scores(twin, hidden, target)
    return -logsigmoid(at_target) - logsigmoid(-scores).sum(-1)


def _drawn_scores(
    twin: Any, hidden: Tensor, target: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The draws of the last step, their log-probabilities and scores, and the target's score."""
    seed, step = twin.rng_counter.tolist()
    ids = twin.sampler.sample(twin.n_samples, rng_counter=(seed, step - 1))
    scores = hidden @ twin.weight[ids].t() + twin.bias[ids]
    at_target = (hidden * twin.weight[target]).sum(-1) + twin.bias[target]
    return ids, twin.sampler.log_prob(ids, dtype=torch.float64), scores, at_target


def clusters(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """A softmax over frequent classes and clusters, and one over the target's cluster."""
    n_top = len(twin.head_weight) - len(twin.tails)
    cluster = torch.bucketize(target, twin.cutoffs.to(target), right=True)
    column = torch.where(cluster == 0, target, n_top + cluster - 1).unsqueeze(-1)
    top = torch.nn.functional.linear(hidden, twin.head_weight, twin.head_bias)
    losses = -torch.log_softmax(top, -1).gather(-1, column).squeeze(-1)
    inside = zip(twin.projections, twin.tails, twin.cutoffs.tolist(), strict=True)
    for i, (projection, vectors, start) in enumerate(inside, start=1):
        rows = (cluster == i).nonzero().squeeze(-1)
        log_prob = torch.log_softmax(hidden[rows] @ projection.t() @ vectors.t(), -1)
        place = (target[rows] - start).unsqueeze(-1)
        losses = losses.index_add(0, rows, -log_prob.gather(-1, place).squeeze(-1))
    return losses


def bands(twin: Any, hidden: Tensor, target: Tensor) -> Tensor:
    """One softmax over bands of classes that use slices, or projections, of the hidden state."""
    seen = hidden if twin.projection is None else hidden @ twin.projection.t()
    slices = seen.split([width for _, width in twin.bands], -1)
    scores = torch.cat([s @ w.t() for s, w in zip(slices, twin.weights, strict=True)], -1)
    return cross_entropy(scores + twin.bias, target, reduction="none")
