"""Log-probabilities in any tree, from the vectors of its nodes; and vectors of nodes from classes.

An *entry* is a row of hidden states and a node whose children it needs. Binary nodes gather one
vector per entry. Wider nodes have a block of vectors, which is gathered if it is small; otherwise
the entries of a node share a matrix product, see :mod:`lastlayer.fused.paths`.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, logsigmoid

from lastlayer._checks import as_counts
from lastlayer._torch import (
    accumulation_dtype,
    forward_result,
    host_sync_allowed,
    in_dtype,
    in_functorch,
    is_eager,
    without_autocast,
)
from lastlayer.fused.paths import (
    TreeTables,
    group_loss,
    groups_suit,
    kernel_suits,
    node_log_probs,
    path_loss,
    reduced,
)
from lastlayer.fused.prediction import rows_held
from lastlayer.fused.scores import LayerProducts, part_of, scores_into, wide_scores
from lastlayer.heads.base import log_frequencies
from lastlayer.kernels import empty, selected
from lastlayer.kernels.search import leaf_log_probs

# Blocks of more vectors than this are not gathered.
WIDEST_GATHERED = 32
# Gathering this many elements takes as long as calling the product of one node (on a CPU).
_NUMBERS_PER_NODE = 30_000
# Lower bound of a class's log weight relative to the heaviest class, in float64.
_LIGHTEST = math.log(1e-280)
# Columns of the vectors summed at a time, since float64 takes twice the memory.
_NUMBERS = 32
# Up to this many different arities, a GPU loops over arities.
_FEW_ARITIES = 4
# Elements of a cache line, to which rows of scores are aligned.
_ALIGNED = 16
# Reading one vector in a walk takes as long as this many vectors in a full product, by device.
_WALKED_PART = {"cuda": 32, "cpu": 4}
# Up to this many multiplications, walks through wide nodes are faster than a product on a CPU.
_WALKED_NUMBERS = 1 << 21


class Nodes(NamedTuple):
    """The vectors and biases of all nodes of a tree."""

    tables: TreeTables
    weight: Tensor
    bias: Tensor | None
    sparse: bool = False

    def first_row(self, node: Tensor) -> Tensor:
        """The weight row of a binary node, or the first one of a wider node."""
        return self.tables.row_start[node] if self.tables.has_wide else node


def wide(values: Tensor) -> Tensor:
    """Converts to float32; float64 stays float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def tree_loss(
    nodes: Nodes, rows: Tensor, target: Tensor, ignore_index: int | None, reduction: str
) -> Tensor:
    """The reduced negative log-likelihood of targets ``(n,)``."""
    tables, weight, bias, sparse = nodes
    how: dict[str, Any] = dict(ignore_index=ignore_index, reduction=reduction, sparse=sparse)
    if tables.binary_paths:
        return path_loss(tables, rows, weight, bias, target, **how)
    with without_autocast(rows):
        grouped = groups_suit(tables, rows)
        rows = rows if grouped else wide(rows)
        one_path = tables.has_wide and not tables.overlaps and len(rows)
        if one_path and (grouped or kernel_suits(rows, weight)):
            return group_loss(tables, rows, weight, bias, target, **how)
        counted, known = None, target
        if ignore_index is not None:
            counted = target != ignore_index
            known = torch.where(counted, target, 0)
            # A NaN in an ignored row would reach the gradient of the root.
            rows = torch.where(counted.unsqueeze(-1), rows, 0.0)
        if tables.n_inner and not tables.has_wide and kernel_suits(rows, weight):
            losses = _overlapping_losses(nodes, rows, known, counted)
        else:
            found = path_log_prob(nodes, rows, known.unsqueeze(-1), counted, once=True)
            losses = -found.squeeze(-1)
        return reduced(losses, target, ignore_index, reduction)[0]


def _overlapping_losses(
    nodes: Nodes, rows: Tensor, classes: Tensor, counted: Tensor | None
) -> Tensor:
    """Losses of classes ``(n,)`` with any number of binary paths; 0 in rows not in ``counted``.

    Each path is a row of :func:`path_loss`, so that classes with many paths cause no padding for
    classes with few.
    """
    tables, weight, bias, sparse = nodes
    first = tables.class_start[classes]
    n = tables.class_start[classes + 1] - first
    if counted is not None:
        n = torch.where(counted, n, 1)
    there = torch.arange(max(n.tolist(), default=1)) < n.unsqueeze(-1)
    of_row, step = there.nonzero(as_tuple=True)
    given = tables, rows.index_select(0, of_row), weight, bias, first[of_row] + step
    losses = path_loss(*given, ignore_index=None, reduction="none", sparse=sparse)
    paths = losses.new_full(there.shape, -torch.inf).index_put((of_row, step), -losses)
    total = -torch.logsumexp(paths, -1)
    return total if counted is None else torch.where(counted, total, 0.0)


def path_log_prob(
    nodes: Nodes, rows: Tensor, classes: Tensor, counted: Tensor | None = None, once: bool = False
) -> Tensor:
    """Log-probabilities of classes ``(n, k)``; 0 in rows not in ``counted``.

    Rows are float32 or float64; any dtype if ``groups_suit`` and ``once``. ``once`` says that
    second derivatives are not needed.
    """
    tables = nodes.tables
    if not tables.n_inner:
        return rows[:, :0].sum(-1, keepdim=True).expand(classes.shape)
    edges, inside, there = tables.edges_of(classes, counted)
    paths = edges.shape[1] * edges.shape[2]
    made = _edge_log_prob(nodes, rows, edges.flatten(1), inside.flatten(1), paths, once)
    total = _over_edges(made.view(edges.shape), there)
    if there is None or counted is None:
        return total
    return torch.where(counted.unsqueeze(-1), total, 0.0)


def shared_log_prob(nodes: Nodes, rows: Tensor, classes: Tensor) -> Tensor:
    """Log-probabilities of classes ``(n, k)`` that are the same for all rows.

    Each vector is used in one product. Needs a host sync, to know which ones.
    """
    tables = nodes.tables
    edges, inside, there = tables.edges_of(classes[:1])
    node, position = tables.node_and_position(edges)
    # Padding entries use the root, which is on every path.
    used, place = torch.where(inside, node, 0).unique(return_inverse=True)
    arity = tables.child_start[used + 1] - tables.child_start[used]
    # The first column of each node among the log-probabilities by arity.
    first, n, parts = torch.empty_like(used), 0, []
    for each in arity.unique().tolist():
        mine = (arity == each).nonzero().squeeze(-1)
        steps = torch.arange(1 if each == 2 else each, device=used.device)
        picked = (tables.row_start[used[mine]].unsqueeze(-1) + steps).flatten()
        biases = None if nodes.bias is None else _gathered(nodes, nodes.bias, picked, rows.dtype)
        scores = linear(rows, _gathered(nodes, nodes.weight, picked, rows.dtype), biases)
        parts.append(_of_children(scores.unflatten(1, (-1, len(steps))), -1).flatten(1))
        first[mine] = n + each * torch.arange(len(mine), device=used.device)
        n += each * len(mine)
    parts.append(rows.new_zeros(len(rows), 1))
    columns = torch.where(inside, first[place] + position, n)[0]
    there = None if there is None else there.expand(len(rows), -1, -1)
    return _over_edges(torch.cat(parts, 1)[:, columns], there)


def _over_edges(log_probs: Tensor, there: Tensor | None) -> Tensor:
    """Log-probabilities of classes ``(n, k)`` from those of edges ``(n, k, paths, length)``."""
    sums = log_probs.sum(-1)
    if there is None:
        alone: Tensor = sums.squeeze(-1)
        return alone
    return torch.logsumexp(torch.where(there, sums, -torch.inf), -1)


def _of_children(scores: Tensor, dim: int) -> Tensor:
    """Log-probabilities of the children of nodes, from the scores of their rows along ``dim``."""
    if scores.shape[dim] == 1:
        return logsigmoid(torch.cat([-scores, scores], dim))
    return torch.log_softmax(scores, dim)


def _edge_log_prob(
    nodes: Nodes, rows: Tensor, edges: Tensor, inside: Tensor, paths: int, once: bool
) -> Tensor:
    """Log-probability of each edge given its node, ``(n, m)``; 0 for edges not ``inside``."""
    tables, weight, bias, sparse = nodes
    node, position = tables.node_and_position(edges)

    def in_groups(asked: Tensor) -> Tensor:
        some = torch.where(asked, node, tables.n_inner)
        return node_log_probs(
            tables, rows, weight, bias, some, position, paths=paths, sparse=sparse
        )

    widest = tables.widest
    if (once or widest > WIDEST_GATHERED) and groups_suit(tables, rows) and edges.numel():
        return in_groups(inside)
    if not tables.has_wide:
        # Padded for a batched product: the paths of a batch have about the same length.
        return torch.where(inside, _binary(nodes, rows, torch.where(inside, node, 0), position), 0)
    # Without recording there are no second derivatives either.
    once = once or not torch.is_grad_enabled()
    if (once or widest > WIDEST_GATHERED) and kernel_suits(rows, weight) and edges.numel():
        return in_groups(inside)
    binary = tables.child_start[node + 1] - tables.child_start[node] == 2
    crowded = once and edges.numel() * widest * rows.shape[1] > _NUMBERS_PER_NODE * tables.n_inner
    if (widest > WIDEST_GATHERED or crowded) and edges.numel() and host_sync_allowed(rows):
        made = in_groups(inside & ~binary)
    else:
        made = _listed(_wide, nodes, rows, node, position, inside & ~binary)
    if tables.has_binary:
        made = made + _listed(_binary, nodes, rows, node, position, inside & binary)
    return made


def _listed(
    log_prob: Callable[[Nodes, Tensor, Tensor, Tensor], Tensor],
    nodes: Nodes,
    rows: Tensor,
    node: Tensor,
    position: Tensor,
    asked: Tensor,
) -> Tensor:
    """``log_prob`` at the nodes ``(n, m)`` where ``asked`` is true, 0 elsewhere.

    These are collected in a list, so that the others cost nothing; unless no host sync is allowed
    for its length, as in torch.compile.
    """
    if not torch.compiler.is_compiling() and host_sync_allowed(node):
        of_row, at = asked.nonzero(as_tuple=True)
        some, taken = node[of_row, at].unsqueeze(-1), position[of_row, at].unsqueeze(-1)
        made = log_prob(nodes, rows[of_row], some, taken).squeeze(-1)
        return rows.new_zeros(node.shape).index_put((of_row, at), made)
    some, taken = (torch.where(asked, each, 0).reshape(-1, 1) for each in (node, position))
    made = log_prob(nodes, rows.repeat_interleave(node.shape[1], 0), some, taken)
    return torch.where(asked, made.reshape(node.shape), 0.0)


def _binary(nodes: Nodes, rows: Tensor, node: Tensor, position: Tensor) -> Tensor:
    """Log-probabilities at binary nodes ``(n, m)``."""
    scores = gathered_scores(nodes, rows, nodes.first_row(node))
    return logsigmoid(torch.where(position == 1, scores, -scores))


def _wide(nodes: Nodes, rows: Tensor, node: Tensor, position: Tensor) -> Tensor:
    """Log-probabilities at wide nodes ``(n, 1)``."""
    log_probs = gathered_block(nodes, rows, node.squeeze(-1), nodes.tables.widest)
    return log_probs.gather(-1, position)


def gathered_scores(nodes: Nodes, rows: Tensor, picked: Tensor) -> Tensor:
    """Scores of the weight rows that are picked for each row, ``(n, m)``."""
    vectors = _gathered(nodes, nodes.weight, picked, rows.dtype)
    scores = torch.bmm(vectors, rows.unsqueeze(-1)).squeeze(-1)
    if nodes.bias is None:
        return scores
    return scores + _gathered(nodes, nodes.bias, picked, rows.dtype)


def gathered_block(nodes: Nodes, rows: Tensor, node: Tensor, width: int) -> Tensor:
    """Log-probabilities of the children of each row's wide node, ``(n, width)``; -inf pads."""
    first = nodes.tables.row_start[node]
    steps = torch.arange(width, device=node.device)
    there = steps < (nodes.tables.row_start[node + 1] - first).unsqueeze(-1)
    picked = torch.where(there, first.unsqueeze(-1) + steps, 0)
    scores = gathered_scores(nodes, rows, picked)
    return torch.log_softmax(torch.where(there, scores, -torch.inf), -1)


def _gathered(nodes: Nodes, values: Tensor, picked: Tensor, dtype: torch.dtype) -> Tensor:
    """``values[picked]`` of weight or bias in ``dtype``, with a row-sparse gradient if wanted."""
    if not (torch.is_grad_enabled() and values.requires_grad):
        return values[picked].to(dtype)
    # torch's embedding has no second derivatives for an empty index.
    if values.dim() == 2 and values.dtype == dtype and (nodes.sparse or picked.numel()):
        return embedding(picked, values, sparse=nodes.sparse)
    if in_functorch() or (not nodes.sparse and values.dtype == dtype):
        return values[picked].to(dtype)
    made: Tensor = _GatheredRows.apply(values, picked, dtype, nodes.sparse)
    return made


class _GatheredRows(torch.autograd.Function):
    """Sums the gradient of a row in the wider dtype: every row contributes to that of the root."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, picked: Tensor, dtype: torch.dtype, sparse: bool
    ) -> Tensor:
        ctx.save_for_backward(picked)
        ctx.like = values.shape, values.dtype, sparse
        return forward_result(values[picked].to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (picked,) = ctx.saved_tensors
        shape, dtype, sparse = ctx.like
        at, grad = picked.reshape(-1), grad.reshape(-1, *shape[1:])
        if not sparse:
            total = grad.new_zeros(shape).index_add(0, at, grad)
            return total.to(dtype), None, None, None
        made = torch.sparse_coo_tensor(at.unsqueeze(0), grad, shape, check_invariants=False)
        if dtype != grad.dtype:
            made = made.coalesce().to(dtype)
        return made, None, None, None


def all_log_prob(nodes: Nodes, rows: Tensor, classes: Tensor | None) -> Tensor:
    """Log-probabilities of ``classes`` ``(n, k)``, or of all, summed level by level."""
    tables, weight, bias, _ = nodes
    biases = None if bias is None else in_dtype(bias, rows.dtype)
    made = leaves_of(tables, wide_scores(rows, in_dtype(weight, rows.dtype), biases))
    return made if classes is None else made.gather(-1, classes)


def leaves_of(tables: TreeTables, scores: Tensor) -> Tensor:
    """Log-probabilities of all classes ``(n, n_classes)`` from the scores of all nodes' rows."""
    if not tables.n_inner:
        return scores.sum(-1, keepdim=True)
    # Transposed, one row per score, so that gathered rows are contiguous.
    leaves = _down_to_leaves(tables, _edge_log_probs(tables, scores.t().contiguous()))
    return (_over_paths(tables, leaves) if tables.overlaps else leaves).t()


def is_predictable(nodes: Nodes, rows: Tensor) -> bool:
    """Whether there are kernels for log-probabilities without a gradient."""
    tables = nodes.tables
    return (
        tables.n_inner > 0
        and not (tables.overlaps and rows.device.type == "cpu")
        and is_eager(rows)
        and selected("tree_log_probs", rows.device.type, rows.dtype) != "reference"
    )


def all_leaves(
    nodes: Nodes, rows: Tensor, classes: Tensor | None, chunk_rows: int | str = "auto"
) -> Tensor:
    """:func:`all_log_prob` by kernels, if :func:`is_predictable`; without a gradient.

    The scores of all nodes are one product, computed for a chunk of rows at a time.
    """
    tables, weight, bias, _ = nodes
    n, n_rows, on_cpu = rows.shape[0], tables.n_rows, rows.device.type == "cpu"
    weight, dtype = in_dtype(weight, rows.dtype), accumulation_dtype(rows.dtype)
    made = empty((n, tables.n_classes), dtype, rows.device)
    step = rows_held(rows, n_rows, chunk_rows)
    products = LayerProducts([weight], None, n)
    # On a CPU, output rows whose length is no multiple of a SIMD vector take twice as long.
    width = -(-n_rows // _ALIGNED) * _ALIGNED if on_cpu else products.stride
    memory = empty((min(n, step), width), dtype, rows.device)
    tree = None if on_cpu else tables.for_leaves()
    for first in range(0, n, step):
        part = slice(first, min(n, first + step))
        some, into = part_of(rows, part), part_of(made, part)
        if tree is None:
            from lastlayer.kernels.node_groups import cpu

            held = part_of(memory, slice(0, part.stop - first))
            biases = None if bias is None else in_dtype(bias, rows.dtype)
            scores_into(products.scores_in(held), some, weight, biases)
            edges = tables.child_start, tables.row_start, tables.child, tables.path_end
            cpu.leaves(held, *edges, into)
        else:
            from lastlayer.kernels.node_groups import triton

            scores = products.scores_into(memory, some)
            triton.leaves(scores, bias, tree, into)
    return made if classes is None else made.gather(-1, classes)


def walked_log_prob(nodes: Nodes, rows: Tensor, classes: Tensor) -> Tensor:
    """Log-probabilities of ``classes`` ``(n, k)``, each with one path, by a walk along it."""
    tables, weight, bias, _ = nodes
    tree = tables.child_start, tables.row_start, tables.edge_node, tables.path_start
    made: Tensor = leaf_log_probs(
        "auto", rows, weight, bias, *tree, tables.path_edge, tables.widest, classes
    )
    return made


def walks_suit(nodes: Nodes, rows: Tensor, walks: int) -> bool:
    """Whether this many walks per row are faster than computing all scores."""
    tables, device = nodes.tables, rows.device.type
    read = walks * tables.path_rows
    if device == "cpu" and tables.has_wide:
        # Walks do not share products at a node, as products with all scores do.
        return read * rows.numel() < _WALKED_NUMBERS
    return read * _WALKED_PART.get(device, 1) <= tables.n_rows


def _edge_log_probs(tables: TreeTables, scores: Tensor) -> Tensor:
    """Log-probabilities ``(n_edges, n)`` of edges given their node, from scores ``(n_rows, n)``."""
    if scores.device.type == "cuda" and len(tables.arities) > _FEW_ARITIES:
        return _normalised_edges(tables, scores)
    return _in_edge_order(tables, [_of_children(mine, 1) for mine in _by_arity(tables, scores)])


def _normalised_edges(tables: TreeTables, scores: Tensor) -> Tensor:
    """:func:`_edge_log_probs` without a loop over arities; requires ``tables.has_wide``."""
    node, known = tables.edge_node, tables.edge_row
    # The first child of a binary node has the score 0.
    first = (known & 3 == 1).unsqueeze(-1)
    own = torch.where(first, 0.0, scores.index_select(0, known >> 2))
    shape, at = (tables.n_inner, scores.shape[1]), node.long().unsqueeze(-1).expand_as(own)
    top = own.new_full(shape, -torch.inf).scatter_reduce(0, at, own.detach(), "amax")
    distances = own - top.index_select(0, node)
    total = own.new_zeros(shape).index_add(0, node, distances.exp())
    return distances - total.log().index_select(0, node)


def _by_arity(tables: TreeTables, values: Tensor) -> Iterator[Tensor]:
    """For each arity, the values ``(n_rows, n)`` of its nodes: ``(nodes, rows of a node, n)``."""
    for arity in tables.arities:
        mine = values
        if len(tables.arities) > 1:
            mine = values.index_select(0, tables.rows_of_arity(arity))
        yield mine.unflatten(0, (-1, 1 if arity == 2 else arity))


def _in_edge_order(tables: TreeTables, parts: list[Tensor]) -> Tensor:
    """``(n_edges, n)`` from ``(nodes, arity, n)`` of each arity."""
    flat = [part.flatten(0, 1) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat).index_select(0, tables.edge_slot)


def _down_to_leaves(tables: TreeTables, edges: Tensor) -> Tensor:
    """Sums of ``(n_edges, n)`` along each path, ``(n_paths, n)``."""
    sums = [edges[slice(*tables.levels[0])]]
    for first, last in tables.levels[1:]:
        above = sums[-1].index_select(0, tables.edge_above[first:last])
        sums.append(edges[first:last] + above)
    return torch.cat(sums).index_select(0, tables.path_end)


def _over_paths(tables: TreeTables, leaves: Tensor) -> Tensor:
    """Log of the sum over the paths of each class, ``(n_classes, n)``."""
    shape = tables.n_classes, leaves.shape[1]
    known, classes = leaves.detach(), tables.path_class
    top = known.new_full(shape, -torch.inf).scatter_reduce(
        0, classes.unsqueeze(-1).expand_as(known), known, "amax"
    )
    top = torch.where(top == -torch.inf, 0.0, top)
    shares = (leaves - top.index_select(0, classes)).exp()
    return leaves.new_zeros(shape).index_add(0, classes, shares).log() + top


@torch.no_grad()
def init_nodes(nodes: Nodes, vectors: Tensor, biases: Tensor, counts: Any) -> None:
    """Initialises weight and bias from class vectors ``(n_classes, d)`` and biases.

    The exact score of a subtree is the logsumexp of its classes' scores, which is not linear in the
    hidden state h. For any weights q that sum to 1,

        log Σ exp(v_c·h + b_c)  ≥  (Σ q_c v_c)·h + Σ q_c b_c + H(q),    H the entropy,

    with equality where q are the probabilities at h. The right side is linear: a node gets this.
    q is proportional to ``counts``; without them it is the probabilities at h = 0, which follow
    from the biases.
    """
    tables = nodes.tables
    if not tables.n_inner:
        return
    log_weights = biases.double()
    if counts is not None:
        log_weights = torch.from_numpy(as_counts(counts, tables.n_classes)).log().to(log_weights)
    log_weights = (log_weights - log_weights.max()).clamp(min=_LIGHTEST)
    classes = tables.path_class
    # A class with several paths has an equal part of its weight on each.
    shares = torch.bincount(classes).double().log()
    paths = (log_weights - shares)[classes]
    weights = paths.exp().unsqueeze(-1)
    mass = _up_to_root(tables, weights)
    for first in range(0, vectors.shape[1], _NUMBERS):
        part = slice(first, first + _NUMBERS)
        some = vectors[:, part].double()[classes]
        nodes.weight[:, part] = _as_rows(tables, _up_to_root(tables, weights * some) / mass)
    if nodes.bias is not None:
        # Mean bias and entropy together; here, too, a class is divided over its paths.
        own = ((biases.double() - shares)[classes] - paths).unsqueeze(-1)
        made = _up_to_root(tables, weights * own) / mass + mass.log()
        nodes.bias.copy_(_as_rows(tables, made).squeeze(-1))


@torch.no_grad()
def init_biases(tables: TreeTables, bias: Tensor, counts: Any) -> None:
    """Sets ``bias`` so that the probabilities at h = 0 are the class frequencies."""
    if not tables.n_inner:
        return
    like = torch.empty(0, dtype=torch.float64, device=bias.device)
    shares = log_frequencies(counts, tables.n_classes, like).exp()
    leaves = (shares / torch.bincount(tables.path_class))[tables.path_class]
    mass = _up_to_root(tables, leaves.unsqueeze(-1))
    total = mass.new_zeros(tables.n_inner, 1).index_add_(0, tables.edge_node, mass)
    logs = (mass / total.index_select(0, tables.edge_node)).log()
    bias.copy_(_as_rows(tables, logs).squeeze(-1))


@torch.no_grad()
def class_vectors(nodes: Nodes) -> tuple[Tensor, Tensor]:
    """Vectors ``(n_classes, d)`` and biases ``(n_classes,)`` of a flat layer close to the tree.

    This is the linearisation at h = 0 of the log-probabilities. :func:`init_nodes` inverts it for
    the same tree.
    """
    tables, weight = nodes.tables, wide(nodes.weight)
    if not tables.n_inner:
        return weight.new_zeros(1, weight.shape[1]), weight.new_zeros(1)
    at_zero = weight.new_zeros(len(weight)) if nodes.bias is None else wide(nodes.bias)
    edges = _edge_log_probs(tables, at_zero.unsqueeze(-1))
    probs = edges.exp()[_rows_are_edges(tables)]
    slopes = []
    for mine, p in zip(_by_arity(tables, weight), _by_arity(tables, probs), strict=True):
        if mine.shape[1] == 1:
            # p is that of the second child.
            slopes.append(torch.cat([-p * mine, (1.0 - p) * mine], 1))
        else:
            slopes.append(mine - (p * mine).sum(1, keepdim=True))
    leaves = _down_to_leaves(tables, edges)
    vectors = _down_to_leaves(tables, _in_edge_order(tables, slopes))
    if not tables.overlaps:
        return vectors, leaves.squeeze(-1)
    total = _over_paths(tables, leaves)
    shares = (leaves - total[tables.path_class]).exp()
    mixed = vectors.new_zeros(tables.n_classes, vectors.shape[1])
    return mixed.index_add(0, tables.path_class, shares * vectors), total.squeeze(-1)


def _rows_are_edges(tables: TreeTables) -> Tensor:
    """Mask of the edges that have a weight row: all but the first edge of binary nodes."""
    first, last = tables.child_start[:-1], tables.child_start[1:]
    kept = torch.ones(tables.n_edges, dtype=torch.bool, device=first.device)
    kept[first[last - first == 2]] = False
    return kept


def _as_rows(tables: TreeTables, edges: Tensor) -> Tensor:
    """Weight rows from edge values ``(n_edges, n)``; at binary nodes second minus first child."""
    first, last = tables.child_start[:-1], tables.child_start[1:]
    binary = last - first == 2
    rows = edges[_rows_are_edges(tables)]
    rows[tables.row_start[:-1][binary]] -= edges[first[binary]]
    return rows


def _up_to_root(tables: TreeTables, leaves: Tensor) -> Tensor:
    """Sums of ``(n_paths, n)`` over the leaves below each edge, ``(n_edges, n)``."""
    edges = leaves.new_zeros(tables.n_edges, leaves.shape[1])
    edges[tables.path_end.long()] = leaves
    for (above, start), (first, last) in zip(
        reversed(tables.levels[:-1]), reversed(tables.levels[1:]), strict=True
    ):
        edges[above:start].index_add_(0, tables.edge_above[first:last], edges[first:last])
    return edges
