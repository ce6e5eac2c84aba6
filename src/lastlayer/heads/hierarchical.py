"""The hierarchical softmax: a class is a path through a tree of small choices."""

import hashlib
import math
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from lastlayer.heads._checks import (
    check_classes,
    check_count,
    check_generator,
    check_hidden,
    check_target,
)
from lastlayer.heads._node_scores import Nodes, edge_log_prob
from lastlayer.heads._rows import row_chunks
from lastlayer.heads._sampling import check_drawn
from lastlayer.heads._scores import wide_scores
from lastlayer.heads._tree_levels import COPIES, all_log_prob
from lastlayer.heads._tree_search import Found, beam_search, draw_leaves, exact_search
from lastlayer.heads._tree_start import class_vectors, node_vectors
from lastlayer.heads._tree_tables import TreeTables
from lastlayer.heads.base import Head, TopK
from lastlayer.trees import Tree
from lastlayer.trees._checks import as_counts

_TREE = "tree.safetensors"
# Numbers held for each gathered one, itself included.
_PATH_COPIES = 3.0
# Rows that are searched at a time.
_SEARCHED_ROWS = 1024
# Where more than this part of the classes is asked for, sorting all is faster than a search.
_SEARCHED_PART, _SEARCHED_CLASSES = 1 / 8, 512


class HierarchicalSoftmax(Head):
    r"""A choice among the children of each node on the way from the root of a tree to a class.

    .. math:: \log p_c = \sum_{v \in \mathrm{path}(c)} \log p(\text{child of } v \mid v, h)

    At a node with two children one vector decides: the second child has the probability
    :math:`\sigma(w_v \cdot h + b_v)`. At a wider node every child has a vector, and the
    probabilities are a softmax over its children. They sum to 1 over all classes by construction.
    In a tree that overlaps, a class has the sum of its paths.

    Choose it where classes are very many and training has to be cheap, with a tree that fits:
    Huffman's for speed, one that is learned (:func:`lastlayer.trees.cluster`) for accuracy.

    Cost: a training step touches the nodes on the paths of its targets, some log₂ of n_classes
    for each row, or fewer for frequent classes in Huffman's tree. All classes cost as much as a
    flat layer. Gathered vectors of a step, rows × path × in_features, are held until backward;
    nodes of more than 32 children are taken one by one instead, except inside ``torch.compile``.

    With ``sparse=True`` the gradients of ``weight`` and ``bias`` are sparse tensors of the rows
    that were touched, for ``torch.optim.SparseAdam`` or SGD: without it, most of a step is spent
    on zeros. The gradient of ``log_prob`` for all classes is dense, and so is all that is
    compiled.

    Args:
        in_features: how many numbers a hidden state has.
        tree: where each class is.
        bias: whether nodes have biases.
        sparse: whether gradients are row-sparse.
        ignore_index: rows with this target count for nothing; None where every target counts.
        reduction: "mean" over the rows that count, "sum" or "none".
        device: where the parameters are made.
        dtype: of the parameters.

    Attributes:
        tree: as it was given.
        weight: ``(n_rows, in_features)``: one row for a binary node, one for each child of a
            wider one, in the order of the nodes.
        bias: ``(n_rows,)``, or None.

    Example:
        >>> import torch
        >>> from lastlayer import trees
        >>> tree = trees.huffman([60, 25, 10, 5], labels=["the", "cat", "purrs", "loudly"])
        >>> head = HierarchicalSoftmax(16, tree)
        >>> hidden, target = torch.randn(8, 16), torch.randint(4, (8,))
        >>> head(hidden, target).backward()
        >>> head.weight.shape
        torch.Size([3, 16])

    Reference:
        Morin and Bengio, Hierarchical probabilistic neural network language model, AISTATS 2005;
        Mnih and Hinton, A scalable hierarchical distributed language model, NIPS 2008.
    """

    weight: Parameter
    bias: Parameter | None
    tree_digest: Tensor

    def __init__(
        self,
        in_features: int,
        tree: Tree,
        *,
        bias: bool = True,
        sparse: bool = False,
        ignore_index: int | None = -100,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_tree(tree)
        super().__init__(
            in_features, tree.n_classes, ignore_index=ignore_index, reduction=reduction
        )
        self.tree, self.sparse = tree, sparse
        n_rows = int(np.where(tree.arity == 2, 1, tree.arity).sum())
        self.weight = Parameter(torch.empty(n_rows, in_features, device=device, dtype=dtype))
        biases = torch.empty(n_rows, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if biases is None else Parameter(biases))
        # In the state, so that it is not loaded into a head with another tree of the same size.
        self.register_buffer("tree_digest", torch.tensor(0, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh numbers, distributed as those of ``nn.Linear``; and the tables of the tree.

        A head that was made on the meta device is whole after ``to_empty`` and this.
        """
        self._tables = TreeTables(self.tree, self.weight.device)
        self.tree_digest = torch.tensor(_digest(self.tree), device=self.weight.device)
        bound = 1.0 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear | torch.nn.Embedding,
        tree: Tree,
        *,
        counts: Any = None,
        **options: Any,
    ) -> Self:
        """A head that starts from a trained flat layer. A warm start, not the same function.

        The score of a subtree is the tangent, at the hidden state 0, of the log of the sum of its
        classes' exponentials: the mean of their vectors and biases, each class by its probability
        there, plus the entropy of these weights, which is the log of their number where they are
        alike. A binary node has the difference of its second and its first child. The closer the
        vectors below a node are to each other, the closer the head is to the layer, so build the
        tree from them: ``trees.cluster(linear.weight)``.

        Args:
            linear: the layer, or an embedding whose rows are the class vectors.
            tree: over the same classes.
            counts: one number a class, the weights of the means; without them the probabilities
                that the biases give.
            options: what else the constructor takes, by name; the layer decides device and dtype.
        """
        if not isinstance(linear, (torch.nn.Linear, torch.nn.Embedding)):
            raise TypeError(
                f"linear: expected an nn.Linear or nn.Embedding, got {type(linear).__name__}"
            )
        _check_tree(tree)
        weight = linear.weight.detach()
        n_classes, in_features = weight.shape
        if n_classes != tree.n_classes:
            raise ValueError(
                f"linear: expected {tree.n_classes} classes, as the tree has, got {n_classes} in a "
                f"weight of shape {tuple(weight.shape)}"
            )
        head = cls(in_features, tree, device=weight.device, dtype=weight.dtype, **options)
        bias = getattr(linear, "bias", None)
        vectors = _wide(weight)
        biases = vectors.new_zeros(n_classes) if bias is None else _wide(bias.detach())
        head._start_from(vectors, biases, counts)
        return head

    def relearn(self, tree: Tree, *, counts: Any = None) -> Self:
        """A new head on another tree over the same classes, started from this one.

        Each class gets the vector that this tree implies, the signed sum of the vectors on its
        path, weighted as in the tangent of its log-probability at the hidden state 0. From these
        the new nodes are made as :meth:`from_linear` makes them. From a tree without overlap to
        itself nothing changes.

        The new head has the options, device and dtype of this one, which is left alone. Its
        parameters are other tensors: make an optimiser for them.

        Args:
            tree: such as ``trees.cluster`` makes of the mean hidden states of each class.
            counts: one number a class, the weights of the means; without them the probabilities
                at the hidden state 0.
        """
        _check_tree(tree)
        if tree.n_classes != self.n_classes:
            raise ValueError(
                f"tree: expected the {self.n_classes} classes of the head, got {tree.n_classes}"
            )
        made = type(self).from_config({**self.config(), "tree": tree})
        made.to(self.weight.device, self.weight.dtype).train(self.training)
        with torch.no_grad():
            bias = None if self.bias is None else _wide(self.bias)
            made._start_from(*class_vectors(self._tables, _wide(self.weight), bias), counts)
        return made

    @torch.no_grad()
    def _start_from(self, vectors: Tensor, biases: Tensor, counts: Any) -> None:
        if counts is None:
            log_weights = biases
        else:
            weights = torch.from_numpy(as_counts(counts, self.n_classes))
            log_weights = weights.log().to(vectors)
        weight, bias = node_vectors(self._tables, vectors, biases, log_weights)
        self.weight.copy_(weight)
        if self.bias is not None:
            self.bias.copy_(bias)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Minus the log-probability of the targets. Only nodes on their paths are touched."""
        check_hidden(self, hidden)
        check_target(self, hidden, target)
        rows, classes = self._wide_rows(hidden), target.reshape(-1)
        counted = None if self.ignore_index is None else classes != self.ignore_index
        if counted is not None:
            classes = torch.where(counted, classes, 0)
            # A NaN in a row that does not count would reach the gradient of the root.
            rows = torch.where(counted.unsqueeze(-1), rows, 0.0)
        with torch.autocast(hidden.device.type, enabled=False):
            losses = -self._path_log_prob(rows, classes.unsqueeze(-1), counted).squeeze(-1)
        if self.reduction == "none":
            return losses.reshape(target.shape)
        total = losses.sum()
        if self.reduction == "sum":
            return total
        return total / (max(1, len(losses)) if counted is None else counted.sum().clamp(min=1))

    def log_prob(self, hidden: Tensor, classes: Tensor | None = None) -> Tensor:
        """Exact log-probabilities in float32, or in float64 from float64.

        For all classes the scores of all nodes are one product, and log-probabilities are added
        down the tree level by level, for a chunk of rows at a time. For chosen classes only their
        paths are touched, unless these have more nodes than the tree. The result is
        differentiable; for chosen classes backward gathers the vectors of each chunk again.

        Args:
            hidden: ``(*batch, in_features)``.
            classes: class ids, int64: ``(*batch, k)``, or ``(k,)`` for every row; None for all.

        Returns:
            ``(*batch, n_classes)``, or ``(*batch, k)``.
        """
        check_hidden(self, hidden)
        chosen = None if classes is None else check_classes(self, hidden, classes)
        recording = torch.is_grad_enabled() and (
            hidden.requires_grad or any(each.requires_grad for each in self.parameters())
        )
        with torch.autocast(hidden.device.type, enabled=False):
            if chosen is None or self._path_rows(chosen) > self._tables.n_rows:
                made = self._all_log_prob(hidden, recording)
                made = made if chosen is None else made.gather(-1, chosen)
            else:
                made = self._chosen_log_prob(hidden, chosen, recording)
        return made.reshape(*hidden.shape[:-1], made.shape[-1])

    def _all_log_prob(self, hidden: Tensor, recording: bool) -> Tensor:
        rows = self._product_rows(hidden)
        if recording:
            return self._rows_log_prob(rows)
        dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
        made = rows.new_empty(rows.shape[0], self.n_classes, dtype=dtype)
        for part in row_chunks(rows, self._tables.n_edges // 2, self.chunk_rows, COPIES):
            made[part] = self._rows_log_prob(rows[part])
        return made

    def _rows_log_prob(self, rows: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(rows.dtype)
        scores = wide_scores(rows, self.weight.to(rows.dtype), bias)
        return all_log_prob(self._tables, scores)

    def _chosen_log_prob(self, hidden: Tensor, chosen: Tensor, recording: bool) -> Tensor:
        rows = self._wide_rows(hidden)
        gathered = self._path_rows(chosen) * self.in_features
        made = []
        for part in row_chunks(rows, gathered, self.chunk_rows, _PATH_COPIES):
            if recording:
                made.append(checkpoint(
                    self._path_log_prob, rows[part], chosen[part],
                    use_reentrant=False, preserve_rng_state=False,
                ))  # fmt: skip
            else:
                made.append(self._path_log_prob(rows[part], chosen[part]))
        return torch.cat(made)

    def _path_rows(self, chosen: Tensor) -> int:
        """The most rows of the weight that chosen classes ``(n, k)`` take."""
        tables = self._tables
        wide = tables.widest if tables.has_wide else 1
        return int(chosen.shape[-1]) * tables.most_paths * tables.longest * wide

    def _path_log_prob(
        self, rows: Tensor, classes: Tensor, counted: Tensor | None = None
    ) -> Tensor:
        """Of classes ``(n, k)``; 0 in rows that do not count."""
        tables = self._tables
        if not tables.n_inner:
            return rows[:, :0].sum(-1, keepdim=True).expand(classes.shape)
        paths, there = tables.paths_of(classes)
        asked = None if counted is None else counted[:, None, None].expand_as(paths)
        if there is not None:
            asked = there if asked is None else asked & there
        edges, inside = tables.edges_of(paths, asked)
        made = edge_log_prob(self._nodes, rows, edges.flatten(1), inside.flatten(1))
        sums = made.unflatten(1, tuple(edges.shape[1:])).sum(-1)
        if there is None:
            alone: Tensor = sums.squeeze(-1)
            return alone
        total = torch.logsumexp(torch.where(there, sums, -torch.inf), -1)
        return total if counted is None else torch.where(counted.unsqueeze(-1), total, 0.0)

    @property
    def _nodes(self) -> Nodes:
        sparse = self.sparse and not torch.compiler.is_compiling()
        return Nodes(self._tables, self.weight, self.bias, sparse)

    def _product_rows(self, hidden: Tensor) -> Tensor:
        """Rows in the dtype of autocast where it is on."""
        rows, device = hidden.reshape(-1, self.in_features), hidden.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        return rows.to(torch.get_autocast_dtype(device)) if autocast else rows

    def _wide_rows(self, hidden: Tensor) -> Tensor:
        """Rows in float32, or in float64 from float64: what is gathered is not rounded."""
        return _wide(hidden.reshape(-1, self.in_features))

    @torch.no_grad()
    def topk(self, hidden: Tensor, k: int, *, beam: int | None = None) -> TopK:
        """The k most probable classes, exactly as a sort of all log-probabilities has them.

        By two sweeps down the tree. The first follows a few nodes of each level and finds k
        classes. The second opens every node that is at least as probable as the k-th of them.
        That is exact: a child is at most as probable as its parent, so a node that is less
        probable than k known classes has no class below it that is one of the best k.

        A row in which more than a sixteenth of the nodes is open at once is sorted as a whole, and
        so are all where k is more than an eighth of the classes, or where the tree overlaps, as
        the bound does not hold for a sum over paths.

        Args:
            hidden: ``(*batch, in_features)``.
            k: from 1 to ``n_classes``.
            beam: at least k. Only the first sweep, with so many nodes of each level. This is not
                exact: a good class below a node that looks worse than ``beam`` others is missed.
        """
        check_hidden(self, hidden)
        check_count("k", k, most=self.n_classes)
        if beam is not None:
            self._check_beam(beam, k)
        many = self.n_classes > _SEARCHED_CLASSES and k > self.n_classes * _SEARCHED_PART
        if self._tables.overlaps or not self._tables.n_inner or (many and beam is None):
            return super().topk(hidden, k)
        found = self._search(hidden, k, beam)
        shape = *hidden.shape[:-1], k
        return TopK(found.values.reshape(shape), found.classes.reshape(shape))

    def _search(self, hidden: Tensor, k: int, beam: int | None = None) -> Found:
        rows = self._wide_rows(hidden)
        found = []
        with torch.autocast(hidden.device.type, enabled=False):
            for some in rows.split(_SEARCHED_ROWS):
                nodes = self._nodes.with_top(some)
                if beam is None:
                    sort = partial(self._sorted, some.to(self.weight.dtype), k)
                    found.append(exact_search(nodes, some, k, sort))
                else:
                    found.append(beam_search(nodes, some, k, beam))
        return Found(*(torch.cat(each) for each in zip(*found, strict=True)))

    def _sorted(self, rows: Tensor, k: int, some: Tensor) -> tuple[Tensor, Tensor]:
        best = super().topk(rows[some], k)
        return best.values, best.classes

    def _check_beam(self, beam: Any, k: int) -> None:
        check_count("beam", beam)
        if beam < k:
            raise ValueError(f"beam: expected at least k, {k}, got {beam}")
        if self._tables.overlaps:
            raise ValueError(
                f"beam: expected None for a tree that overlaps, got {beam}; a beam finds single "
                "paths, and the probability of a class is the sum over its paths"
            )

    @torch.no_grad()
    def sample(
        self, hidden: Tensor, n_samples: int = 1, *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Independent draws from the probabilities of each row, with replacement.

        A walk down the tree for each, all at once: only nodes that a walk is at are opened.

        Args:
            hidden: ``(*batch, in_features)``.
            n_samples: draws a row.
            generator: where chance comes from, on the device of hidden; torch's own otherwise.

        Returns:
            Class ids ``(*batch, n_samples)``, int64. A row without probabilities, as a NaN
            makes it, is an error on a CPU and inside ``lastlayer.debug()``, and else all -1.
        """
        check_hidden(self, hidden)
        check_count("n_samples", n_samples)
        check_generator(generator, hidden)
        shape = *hidden.shape[:-1], n_samples
        if not self._tables.n_inner:
            return torch.zeros(shape, dtype=torch.int64, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            classes = draw_leaves(self._nodes, self._wide_rows(hidden), n_samples, generator)
        classes = classes.reshape(shape)
        check_drawn(classes)
        return classes

    def config(self) -> dict[str, Any]:
        """The arguments as JSON can hold them, without the tree; :meth:`save` writes it beside."""
        shared = super().config()
        del shared["n_classes"]
        return {**shared, "bias": self.bias is not None, "sparse": self.sparse}

    def _save_extra(self, folder: Path) -> None:
        self.tree.save(folder / _TREE)

    @classmethod
    def _load_extra(cls, folder: Path) -> dict[str, Any]:
        return {"tree": Tree.load(folder / _TREE)}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        digest = state_dict.get(f"{prefix}tree_digest")
        if isinstance(digest, Tensor) and not digest.is_meta and int(digest) != _digest(self.tree):
            raise ValueError(
                "state_dict: expected the state of a head with the same tree, got that of another "
                f"one; make the head with the tree it was trained with, not with {self.tree!r}"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        first, *rest = super().extra_repr().split(", ")
        return ", ".join([first, f"tree={self.tree!r}", *rest])


def _check_tree(tree: Any) -> None:
    if not isinstance(tree, Tree):
        raise TypeError(
            f"tree: expected a lastlayer.trees.Tree, got {type(tree).__name__}; trees.balanced(n) "
            "or trees.huffman(counts) make one"
        )


def _digest(tree: Tree) -> int:
    """A number that tells trees apart, whatever their labels."""
    made = hashlib.blake2b(digest_size=8)
    for array in (tree.child_start, tree.child):
        made.update(np.ascontiguousarray(array, "<i8").tobytes())
    return int.from_bytes(made.digest(), "little", signed=True)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
